"""A run with tail batching: every problem is used once, and a resumed run goes on where it was."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.helpers.launch import slowness
from tests.trainer.conftest import Runs, rows_of
from tests.trainer.test_run import assert_same_samples, wait_for_rows, weights

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


MANY = ("algorithm.group_size=8", "rollout.vllm.max_num_seqs=4")  # a rollout takes several seconds
PARTIAL = (*CONTINUE[1:], *MANY, "evaluation.every=0", "rollout.tensor_parallel_size=2", "trainer.keep_checkpoints=5")
PARTIAL += ("schedule={kind: partial, eta_prompts: 1.5, max_staleness: 3}",)


@pytest.fixture(scope="module")
def undisturbed_partial(runs: Runs) -> Path:
    runs.train("partial-whole", *PARTIAL)
    return runs.folder / "partial-whole"


@pytest.mark.parametrize("phase", ["rollout", "update and save"])
def test_a_run_of_one_engine_killed_in_any_phase_ends_with_the_same_bits(
    runs: Runs, undisturbed_partial: Path, phase: str
) -> None:
    """Killed twice: in the middle of a rollout, or about when it updates and then while a checkpoint is written."""
    name, whole = f"partial-{phase.partition(' ')[0]}", rows_of(undisturbed_partial)
    folder = runs.folder / name / "checkpoints"
    for kill in (1, 2):
        process = runs.start(name, *PARTIAL, fresh=False)
        if phase == "rollout":
            wait_for_rows(runs, name, kill, process)
            time.sleep(0.5 * float(whole[kill]["time/rollout"] or 0))
        elif kill == 1:
            wait_for_rows(runs, name, kill, process)
            times = [
                float(whole[kill][f"time/{before}"] or 0) for before in ("rollout", "reward", "log_probs", "update")
            ]
            time.sleep(sum(times) - 0.5 * times[-1])
        else:
            deadline = time.monotonic() + 600 * slowness()
            while not any(file.name.startswith(f".step_{kill + 1:06d}") for file in folder.glob(".*")):
                assert time.monotonic() < deadline and process.poll() is None, runs.log(name)
                time.sleep(0.005)
        runs.kill(name)
        process.wait()
        assert len(rows_of(runs.folder / name)) < 4, "it was killed before its end"
    assert "from the checkpoint of step" in runs.train(name, *PARTIAL)
    resumed = runs.folder / name
    assert weights(resumed) == weights(undisturbed_partial)
    assert_same_samples(resumed, undisturbed_partial)
    rows = rows_of(resumed)
    for key in ("tail/deferred", "tail/continued", "tail/staleness", "length/mean", "reward/mean", "actor/grad_norm"):
        assert [row[key] for row in rows] == [row[key] for row in whole], key
    assert all(row["tail/continued"] > 0 for row in rows[1:]) and all(row["actor/grad_norm"] > 1e-3 for row in rows)
    assert deferred(resumed, 4) == deferred(undisturbed_partial, 4) != []


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
