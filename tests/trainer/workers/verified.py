"""Two ranks save and verify checkpoints in the background, one of them damaged; rank 0 writes what was said."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

from megatron_tlt.platform.collectives import any_rank
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.trainer.checkpoints import Checkpoints, TrainerState
from tests.trainer.workers.checkpoints import policy_of, update
from tests.trainer.workers.damage import flip_a_bit


def poll_until(checkpoints: Checkpoints, value: float) -> None:
    """Polls, as each step does, until rank 0 knows the verdict of a verification."""
    while any_rank(rank() == 0 and checkpoints.metrics.get("checkpoint/verified") != value):
        checkpoints.poll()
        time.sleep(0.01)


def main(model: str, folder: str) -> None:
    initialize_distributed(120)
    root = Path(folder, "checkpoints")
    policy = policy_of(Path(model))
    rows: dict[str, Any] = {}
    plain = Checkpoints(root.with_name("plain"), 2)
    plain.save(policy, TrainerState(1))
    plain.finish()
    plain.close()
    rows["plain"] = sorted(plain.metrics)
    checkpoints = Checkpoints(root, 2, verify=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for step in (1, 2, 3):
            update(policy)
            checkpoints._verified = None  # that of the step before
            checkpoints.save(policy, TrainerState(step))
            checkpoints.finish()
            poll_until(checkpoints, 1.0)
        rows["intact"] = said.getvalue()
        file = root / "step_000003" / "state.json"
        if rank() == 0:
            flip_a_bit(file)
            assert checkpoints._verification is not None
            checkpoints._verification.start(root / "step_000003")
        poll_until(checkpoints, 0.0)
        rows["damaged"] = said.getvalue()
        update(policy)  # the run goes on
        checkpoints.save(policy, TrainerState(4))
        checkpoints.finish()
        checkpoints.close()
        rows["next"], rows["metrics"] = said.getvalue(), checkpoints.metrics
    rows["left"] = sorted(path.name for path in root.iterdir())
    if rank() == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
