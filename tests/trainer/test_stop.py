"""A run that is asked to stop while it decodes leaves at once, and loses nothing of the steps that are done."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_tlt.observe.metrics import read_metrics
from tests.helpers.launch import slowness, worker_of
from tests.trainer.conftest import Runs
from tests.trainer.test_run import rows

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("signaled", ["launcher", "one rank"])
def test_an_engine_of_two_ranks_leaves_in_the_middle_of_a_rollout(signaled: str, runs: Runs) -> None:
    """One request at a time and 1,536 of them: minutes, were they decoded to the end."""
    name = f"two-ranks-{signaled.replace(' ', '-')}"
    process = runs.start(
        name,
        "rollout.tensor_parallel_size=2",
        "rollout.vllm.max_num_seqs=1",
        "trainer.prompts_per_step=64",
        "algorithm.group_size=24",
        "evaluation.problems=1",
        "evaluation.samples=1",
    )
    while not rows(runs.folder / name):  # the evaluation before the first step
        assert process.poll() is None, runs.log(name)
        time.sleep(0.05)
    time.sleep(2)  # into the rollout
    began = time.monotonic()
    pid = process.pid if signaled == "launcher" else worker_of(runs.started[name], 1)
    psutil.Process(pid).send_signal(signal.SIGTERM)
    assert process.wait(300 * slowness()) == 128 + signal.SIGTERM, runs.log(name)
    assert "stopped by SIGTERM after 0 steps" in runs.log(name)
    assert time.monotonic() - began < 20 * slowness()


def test_a_step_whose_evaluation_is_cut_short_is_recorded_once(runs: Runs) -> None:
    evaluation = ("evaluation.every=1", "evaluation.problems=100", "evaluation.samples=30")
    overrides = ("trainer.steps=2", "trainer.async_save=false", *evaluation)
    process = runs.start("cut-short", *overrides)
    run = runs.folder / "cut-short"
    saved = run / "checkpoints" / "step_000001"
    while not saved.is_dir():
        assert process.poll() is None, runs.log("cut-short")
        time.sleep(0.02)
    psutil.Process(process.pid).send_signal(signal.SIGTERM)
    assert process.wait(300 * slowness()) == 128 + signal.SIGTERM, runs.log("cut-short")
    assert_steps(run, [0, 1])
    assert "eval/pass_at_1" not in read_metrics(run / "metrics.jsonl")[-1], "the evaluation was not cut short"

    runs.train("cut-short", *overrides)
    assert_steps(run, [0, 1, 2])
    assert all("eval/pass_at_1" in row for row in read_metrics(run / "metrics.jsonl"))


def assert_steps(run: Path, expected: list[int]) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == expected
    assert all("actor/loss" in row for row in rows[1:])
