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


CONTINUE = ("tail.deferred=continue", "algorithm.correction={weights: token}")


def test_a_resumed_run_of_one_engine_ends_with_the_same_bits(runs: Runs) -> None:
    """And continues the responses that rounds before had left."""
    continued = CONTINUE
    one = (*TAIL, "rollout.tensor_parallel_size=2", "trainer.keep_checkpoints=5", *continued)
    runs.train("tail-whole", *one)
    runs.train("tail-resumed", *one, "trainer.steps=2")
    assert len(deferred(runs.folder / "tail-resumed", 2)) == 4
    assert "from the checkpoint of step 2" in runs.train("tail-resumed", *one)
    whole, resumed = runs.folder / "tail-whole", runs.folder / "tail-resumed"
    assert (whole / "hf/model.safetensors").read_bytes() == (resumed / "hf/model.safetensors").read_bytes()
    assert deferred(whole, 5) == deferred(resumed, 5) != []
    rows = rows_of(resumed)
    assert [row["tail/continued"] > 0 for row in rows] == [False, False, True, False, False]
    assert [row["tail/staleness"] for row in rows] == [0, 0, 2, 0, 0]


def test_two_engines_continue_what_the_other_began(runs: Runs) -> None:
    """Whatever ends first in time is kept."""
    overrides = (*TAIL, *CONTINUE, "tail.race=time", "run.deterministic=false", "trainer.steps=3")
    runs.train("tail-continued", *overrides)
    rows = rows_of(runs.folder / "tail-continued")
    assert [row["tail/long_round"] for row in rows] == [0, 0, 1]
    assert rows[2]["tail/staleness"] == 2 and 0.1 < rows[2]["tail/continued"] < 1
    assert rows[0]["mismatch/stale_k3_kl"] == 0 < rows[2]["mismatch/k3_kl"] < rows[2]["mismatch/stale_k3_kl"]


def test_partial_rollouts_go_on_in_the_next_step(runs: Runs) -> None:
    overrides = (*CONTINUE[1:], "evaluation.every=0", "run.deterministic=false", "trainer.steps=4")
    runs.train("partial", *overrides, "schedule={kind: partial, eta_prompts: 1.5, max_staleness: 3}")
    rows = rows_of(runs.folder / "partial")
    assert [row["tail/deferred"] for row in rows] == [2, 2, 2, 2], "a step begins half as many again as it trains on"
    assert rows[0]["tail/continued"] == 0 and all(row["tail/continued"] > 0 for row in rows[1:])
    assert all(0 <= row["tail/staleness"] <= 3 for row in rows)


def test_a_resumed_run_one_step_off_ends_with_the_same_bits(runs: Runs) -> None:
    one = (*CONTINUE[1:], "evaluation.every=0", "trainer.steps=4", "rollout.tensor_parallel_size=2")
    one += ("schedule={kind: one_step_off}", "trainer.keep_checkpoints=5")
    runs.train("off-whole", *one)
    runs.train("off-resumed", *one, "trainer.steps=2")
    runs.train("off-resumed", *one)
    whole, resumed = runs.folder / "off-whole", runs.folder / "off-resumed"
    assert (whole / "hf/model.safetensors").read_bytes() == (resumed / "hf/model.safetensors").read_bytes()
    rows = rows_of(whole)
    assert [row["tail/staleness"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["tail/continued"] == 0 and all(0 < row["tail/continued"] <= 1 for row in rows[1:])
