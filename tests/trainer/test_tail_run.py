"""A run with tail batching: every problem is used once, and a resumed run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

TAIL = ("tail={eta_prompts: 1.5, eta_responses: 1.5}", "evaluation.every=0", "trainer.steps=5")


def deferred(run: Path, step: int) -> list[int]:
    state = json.loads((run / "checkpoints" / f"step_{step:06d}" / "state.json").read_text())
    return list(state["deferred"])


def test_short_rounds_leave_problems_for_long_ones(runs: Runs) -> None:
    runs.train("tail", *TAIL, "run.deterministic=false")
    rows = rows_of(runs.folder / "tail")
    assert [row["tail/long_round"] for row in rows] == [0, 0, 1, 0, 0]
    assert [row["tail/deferred"] for row in rows] == [2, 4, 0, 2, 4]
    assert all(0 < row["tail/wasted"] < 0.8 for row in rows if not row["tail/long_round"])
    assert rows[2]["tail/wasted"] == 0 and rows[2]["tail/kept_over_all"] == 1
    assert all(0.2 < row["tail/kept_over_all"] < 1 for row in rows if not row["tail/long_round"])
    short = [row["length/mean"] for row in rows if not row["tail/long_round"]]
    assert max(short) < rows[2]["length/mean"], "problems were left because their responses are long"


def test_a_resumed_run_of_one_engine_ends_with_the_same_bits(runs: Runs) -> None:
    one = (*TAIL, "rollout.tensor_parallel_size=2", "trainer.keep_checkpoints=5")
    runs.train("tail-whole", *one)
    runs.train("tail-resumed", *one, "trainer.steps=2")
    assert len(deferred(runs.folder / "tail-resumed", 2)) == 4
    assert "from the checkpoint of step 2" in runs.train("tail-resumed", *one)
    whole, resumed = runs.folder / "tail-whole", runs.folder / "tail-resumed"
    assert (whole / "hf/model.safetensors").read_bytes() == (resumed / "hf/model.safetensors").read_bytes()
    assert deferred(whole, 5) == deferred(resumed, 5) != []
