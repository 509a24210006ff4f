"""The responses of a bad update's step, kept as a recording: ``RUN/guard/step_NNNNNN``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.data.rollout_batch import TOKENS, RolloutBatch
from megatron_tlt.observe.jsonl import dumps
from megatron_tlt.platform.collectives import broadcast_data, failing_together
from megatron_tlt.platform.device import rank
from megatron_tlt.platform.files import temporary_sibling, write_errors
from megatron_tlt.rollout.replay import append_rows, recording_row
from megatron_tlt.trainer.responses import ScoredResponse

GUARD_FOLDER = "guard"
VERDICT = "verdict.json"


def step_folder(run_folder: Path, step: int) -> Path:
    """Of the responses of step ``step``, counted from 1."""
    return run_folder / GUARD_FOLDER / f"step_{step:06d}"


def save_batch(
    folder: Path,
    scored: Sequence[ScoredResponse],
    batch: RolloutBatch,
    about: Mapping[str, Any],
    keep: int,
) -> None:
    """Writes the responses of a step, and removes older steps beyond ``keep``; a collective over the world.

    Each rank writes the responses that it holds, in the form that ``rollout.engine: replay`` reads; rank 0 writes
    ``about`` into ``verdict.json``. The folder appears with its name when all of it is written; it replaces an earlier
    one of that name.

    Args:
        folder: as :func:`step_folder` gives it.
        scored: all responses of the step.
        batch: as it came from the engines, each response held by one rank.
        about: JSON values.
        keep: number of folders.

    Raises:
        RunError: on every rank, if one of them cannot write.
    """
    temporary = None
    with failing_together(), write_errors(folder):
        if rank() == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            clean_leftovers(folder.parent)
            temporary = temporary_sibling(folder)
            temporary.mkdir()
            (temporary / VERDICT).write_text(dumps(about) + "\n", encoding="utf-8")
    where = Path(broadcast_data(None if temporary is None else str(temporary), str))
    with failing_together():
        rows = list(_rows(scored, batch))
        if rows:
            append_rows(where / f"rank_{rank():05d}.jsonl", rows)
    with failing_together(), write_errors(folder):
        if temporary is not None:
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(temporary, folder)
            kept = sorted(folder.parent.glob("step_*"), key=lambda path: (path.stat().st_mtime_ns, path.name))
            for old in kept[:-keep]:
                shutil.rmtree(old)


def _rows(scored: Sequence[ScoredResponse], batch: RolloutBatch) -> Iterator[dict[str, Any]]:
    for i in batch.held:
        one = scored[i]
        has_mask = batch.loss_mask_G is not None
        yield recording_row(
            batch.tokens(i)[: batch.prompt_lengths[i]].tolist(),
            one.sample,
            batch.response(TOKENS, i).tolist(),
            batch.response("rollout_log_probs_G", i).tolist(),
            one.finish_reason,
            loss_mask=batch.response("loss_mask_G", i).tolist() if has_mask else (),
            turns=one.turns,
            reward=one.reward if has_mask else None,
        )
