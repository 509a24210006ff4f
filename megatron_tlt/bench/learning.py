"""Reward curves with and without speculation over several seeds: a plot and a test of means; resumable.

The runs use ``tlt train``, which resumes an earlier run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.training_runs import Runs, add_run_arguments, finished_runs, write_curves
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.report_data import RunData

ARMS: dict[str, list[str]] = {
    "with": [],
    "without": ["speculation.enabled=false", "spot=null", "drafter=null"],
}
LATE = 1.0 / 3.0
"""Share of the steps, at the end, whose training reward is compared."""
LEVEL = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "runs/learning")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per run; targets: the means of both arms do not differ significantly, at the level of 5 %.

    Raises:
        ConfigError: the config is unreadable, or an existing run has other settings.
        RunError: a run failed.
    """
    found = finished_runs(arguments, ARMS)
    write_curves(arguments.json, found, {arm: f"{arm} speculation" for arm in ARMS})
    return judge(found, arguments.seeds)


def late_reward(run: RunData) -> float:
    """The mean training reward of the run's last steps."""
    _, rewards = run.series("reward/mean")
    return float(np.mean(rewards[-max(1, round(LATE * len(rewards))) :]))


def compare(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Welch's test of equal means: ``p``, the ``difference`` of the means, and half of its 95 % interval."""
    from scipy import stats

    if len({*a, *b}) == 1:  # the test is undefined without variance
        return {"p": 1.0, "difference": 0.0, "half_interval": 0.0}
    found = stats.ttest_ind(a, b, equal_var=False)
    interval = found.confidence_interval(1.0 - LEVEL)
    half = (interval.high - interval.low) / 2
    return {"p": float(found.pvalue), "difference": float(np.mean(a) - np.mean(b)), "half_interval": float(half)}


def judge(found: Runs, seeds: Sequence[int]) -> BenchmarkResult:
    """Rows of the existing runs, and the tests if all exist."""
    result = BenchmarkResult(environment=describe_environment(), name="learning")
    values: dict[str, dict[str, list[float]]] = {"training reward": {}, "held-out pass@1": {}}
    for (arm, seed), data in sorted(found.items()):
        _, passed = data.series("eval/pass_at_1")
        seen = {"training reward": late_reward(data), "held-out pass@1": passed[-1]}
        for name, value in seen.items():
            values[name].setdefault(arm, []).append(value)
        _, gains = data.series("speculation/gain")
        gain = float(np.median(gains)) if arm == "with" and gains else None
        result.rows.append({"arm": arm, "seed": seed, "pass@1 at first": passed[0], **seen, "gain": gain})
    for name, arms in values.items():
        target = f"p of equal means, {name}"
        if len(found) < len(ARMS) * len(seeds) or len(seeds) < 2:
            result.incomplete(target)
            continue
        test = compare(arms["with"], arms["without"])
        result.rows.append({"arm": "with less without", "seed": name, **test})
        result.target(target, test["p"], ">=", LEVEL)
    return result
