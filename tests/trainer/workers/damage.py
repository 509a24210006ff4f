"""Damages real checkpoints in every way and prints what a resume makes of each, in one process."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_tlt.actor.megatron_rng import RngState
from megatron_tlt.actor.policy import Policy
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import initialize_distributed
from megatron_tlt.trainer.checkpoints import Checkpoints, TrainerState
from tests.trainer.workers.checkpoints import policy_of, tensors, update

FILES = (
    "actor/__0_0.distcp",
    "actor/.metadata",
    "actor/common.pt",
    "actor/metadata.json",
    "rng/rank_00000/state.json",
    "state.json",
    "manifest.json",
)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"truncate": truncate, "flip a bit": flip_a_bit, "delete": Path.unlink}


@contextlib.contextmanager
def damaged(checkpoint: Path, file: str, damage: Callable[[Path], None]) -> Iterator[None]:
    whole = checkpoint.with_name(f".{checkpoint.name}.whole")
    shutil.copytree(checkpoint, whole)
    damage(checkpoint / file)
    yield
    shutil.rmtree(checkpoint)
    whole.rename(checkpoint)


def resumed(root: Path, policy: Policy) -> dict[str, Any]:
    """The step it resumed from (None: an error), what was said, and a fingerprint of the state."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            step: int | None = Checkpoints(root, 2, [RngState(policy.layout)]).resume(policy).step
        except RunError as error:
            return {"step": None, "said": said.getvalue(), "error": str(error)}
    sums = [float(tensor.double().sum()) for tensor in tensors(policy)]
    return {"step": step, "said": said.getvalue(), "state": sums}


def main(model: str, folder: str) -> None:
    initialize_distributed()
    root = Path(folder, "checkpoints")
    policy = policy_of(Path(model))
    checkpoints = Checkpoints(root, 2, [RngState(policy.layout)])
    for step in (1, 2):
        update(policy)
        checkpoints.save(policy, TrainerState(step))
    checkpoints.finish()
    rows = [{"damage": "none", **resumed(root, policy)}]
    for file in FILES:
        for name, damage in DAMAGES.items():
            with damaged(root / "step_000002", file, damage):
                rows.append({"damage": name, "file": file, **resumed(root, policy)})
                if file.endswith(".distcp"):
                    with damaged(root / "step_000001", file, damage):
                        rows.append({"damage": f"both: {name}", "file": file, **resumed(root, policy)})
    rows.append({"damage": "none again", **resumed(root, policy)})
    files = {p.relative_to(root / "step_000002").as_posix() for p in (root / "step_000002").rglob("*") if p.is_file()}
    Path(folder, "rows.json").write_text(json.dumps({"rows": rows, "files": sorted(files)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
