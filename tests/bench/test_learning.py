"""The comparison of reward curves: which means differ, what is missing."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tlt.bench import learning
from megatron_tlt.observe.report_data import RunData

SEEDS = [1, 2, 3]


def run_of(seed: int, last: float) -> RunData:
    """Reward rises to ``last`` with noise of 0.02 a step; so does what is held out."""
    draw = np.random.default_rng(seed)
    rewards = np.linspace(0.3, last, 30) + draw.normal(0, 0.02, 30)
    metrics = [{"step": step + 1, "reward/mean": float(reward)} for step, reward in enumerate(rewards)]
    passed = [{"step": step, "eval/pass_at_1": float(rewards[max(0, step - 1)])} for step in (0, 10, 20, 30)]
    return RunData(f"run-{seed}", metrics=[*passed, *metrics])


def runs(with_last: float) -> dict[tuple[str, int], RunData]:
    found = {("without", seed): run_of(seed, 0.5) for seed in SEEDS}
    return found | {("with", seed): run_of(10 + seed, with_last) for seed in SEEDS}


def test_means_that_differ_are_told_apart_and_others_not() -> None:
    same = learning.judge(runs(0.5), SEEDS)
    assert len(same.targets) == 2 and same.all_met
    other = learning.judge(runs(0.3), SEEDS)
    assert not any(target["met"] for target in other.targets.values())
    difference = next(row for row in other.rows if row["seed"] == "training reward")
    # of two lines that rise by 0.2 and not at all, over the last third of the steps
    assert difference["difference"] == pytest.approx(-0.2 * (20 + 29) / 2 / 29, abs=0.02)
    assert difference["half_interval"] > 0


def test_equal_values_without_variance_do_not_differ() -> None:
    assert learning.compare([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]) == {"p": 1.0, "difference": 0.0, "half_interval": 0.0}


def test_a_run_that_is_missing_leaves_the_targets_incomplete() -> None:
    found = runs(0.5)
    del found["with", 3]
    result = learning.judge(found, SEEDS)
    assert {target["op"] for target in result.targets.values()} == {"incomplete"}
    assert len(result.rows) == 5
