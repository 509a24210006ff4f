"""What each recipe of ``algorithm.name`` learns on the same model and problems, over several seeds; resumable.

``grpo`` runs with and without speculation, for the time of a step; all others with it. ``distillation`` is left out: it
learns from a teacher, not from rewards.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from megatron_tlt.algorithms.registry import ALGORITHMS
from megatron_tlt.bench.learning import late_reward
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.training_runs import Runs, add_run_arguments, finished_runs, write_curves
from megatron_tlt.observe.environment import describe_environment

WITHOUT = "grpo_without_speculation"
ARMS: dict[str, list[str]] = {
    WITHOUT: ["speculation.enabled=false", "spot=null", "drafter=null"],
    **{name: [f"algorithm.name={name}"] for name in ALGORITHMS if name != "distillation"},
}
GAIN = 0.05
"""The least gain of held-out pass@1 over the start that counts as learning."""
LEVEL = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "runs/algorithms")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per recipe; targets: each one's mean gain is at least GAIN, and its interval above 0.

    Raises:
        ConfigError: the config is unreadable, or an existing run has other settings.
        RunError: a run failed.
    """
    found = finished_runs(arguments, ARMS)
    write_curves(arguments.json, found, {arm: arm for arm in ARMS if arm != WITHOUT})
    return judge(found, arguments.seeds)


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean by Student's distribution; 0 without variance.

    Raises:
        ValueError: fewer than two values.
    """
    from scipy import stats

    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values, found {len(values)}")
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error


def judge(found: Runs, seeds: Sequence[int]) -> BenchmarkResult:
    """Rows of the recipes with at least one run, and the targets of those with all."""
    result = BenchmarkResult(environment=describe_environment(), name="algorithms")
    for arm in ARMS:
        runs = [found[arm, seed] for seed in seeds if (arm, seed) in found]
        passed = [data.series("eval/pass_at_1")[1] for data in runs]
        gains = [values[-1] - values[0] for values in passed]
        half = interval(gains) if len(gains) > 1 else None
        if runs:
            seconds = [float(np.median(data.series("time/total")[1])) for data in runs]
            result.rows.append(
                {
                    "recipe": arm,
                    "runs": len(runs),
                    "pass@1 at first": float(np.mean([values[0] for values in passed])),
                    "gain": float(np.mean(gains)),
                    "gain, half interval": half,
                    "reward, last steps": float(np.mean([late_reward(data) for data in runs])),
                    "median step (s)": float(np.median(seconds)),
                    "gains by seed": gains,
                    "median steps by seed (s)": seconds,
                }
            )
        if half is None or len(runs) < len(seeds):
            result.incomplete(f"gain of {arm}")
            continue
        result.target(f"gain of {arm}", float(np.mean(gains)), ">=", GAIN)
        result.target(f"lower end of the gain of {arm}", float(np.mean(gains)) - half, ">", 0.0)
    return result
