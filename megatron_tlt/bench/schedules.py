"""What tail batching and bounded asynchrony learn in the time of a run, against steps that wait; resumable."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatron_tlt.bench.algorithms import interval
from megatron_tlt.bench.learning import late_reward
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.training_runs import Runs, add_run_arguments, finished_runs, running_mean
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.report_data import RunData
from megatron_tlt.platform.files import atomic_write_bytes

_CORRECTED = "algorithm.correction={weights: token}"
ARMS: dict[str, list[str]] = {
    "sync": [],
    "tail": ["tail={eta_prompts: 1.25}"],
    "tail-continue": ["tail={eta_prompts: 1.25, deferred: continue}", _CORRECTED],
    "partial": ["schedule={kind: partial}", _CORRECTED],
    "one-step-off": ["schedule={kind: one_step_off}", _CORRECTED],
}
_OF_TAIL = {"wasted": 0.0, "kept_over_all": 1.0, "continued": 0.0, "staleness": 0.0}
"""Metrics of ``tail/``, and what they are where a run has none, as nothing is left out."""
GAIN = 0.05
"""The least gain of held-out pass@1 over the start that counts as learning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "runs/schedules")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per schedule; targets: each one's mean gain is at least GAIN, and its interval above 0.

    Raises:
        ConfigError: the config is unreadable, or an existing run has other settings.
        RunError: a run failed.
    """
    found = finished_runs(arguments, ARMS)
    if arguments.json is not None and found:
        atomic_write_bytes(arguments.json.with_suffix(".svg"), plot_over_time(found))
    return judge(found, arguments.seeds)


def seconds_of(data: RunData) -> list[float]:
    """Seconds of training up to the end of each step."""
    return list(accumulate(data.series("time/total")[1]))


def judge(found: Runs, seeds: Sequence[int]) -> BenchmarkResult:
    """Rows of the schedules with at least one run, and the targets of those with all."""
    result = BenchmarkResult(environment=describe_environment(), name="schedules")
    for arm in ARMS:
        runs = [found[arm, seed] for seed in seeds if (arm, seed) in found]
        passed = [data.series("eval/pass_at_1")[1] for data in runs]
        gains = [values[-1] - values[0] for values in passed]
        half = interval(gains) if len(gains) > 1 else None
        if runs:
            result.rows.append(
                {
                    "schedule": arm,
                    "runs": len(runs),
                    "gain": float(np.mean(gains)),
                    "gain, half interval": half,
                    "reward, last steps": float(np.mean([late_reward(data) for data in runs])),
                    "seconds": float(np.mean([seconds_of(data)[-1] for data in runs])),
                    "seconds by seed": [seconds_of(data)[-1] for data in runs],
                    "gains by seed": gains,
                    **{
                        name: float(
                            np.mean([value for data in runs for value in data.series(f"tail/{name}")[1]] or [nothing])
                        )
                        for name, nothing in _OF_TAIL.items()
                    },
                }
            )
        if half is None or len(runs) < len(seeds):
            result.incomplete(f"gain of {arm}")
            continue
        result.target(f"gain of {arm}", float(np.mean(gains)), ">=", GAIN)
        result.target(f"lower end of the gain of {arm}", float(np.mean(gains)) - half, ">", 0.0)
    return result


def plot_over_time(found: Runs) -> bytes:
    """The SVG of the training reward against seconds: each run's, smoothed over four steps, in its schedule's color."""
    import matplotlib

    from megatron_tlt.observe.report_style import CURVE_COLORS, STANDALONE, new_figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({**STANDALONE, "svg.hashsalt": "schedules"}):
        figure = new_figure(height=3.4, width=9.0)
        axes = figure.subplots()
        for arm, color in zip(ARMS, CURVE_COLORS, strict=False):
            for number, data in enumerate(data for (of, _), data in sorted(found.items()) if of == arm):
                smooth = running_mean(data.series("reward/mean")[1], 4)
                label = arm if number == 0 else None
                axes.plot(seconds_of(data)[-len(smooth) :], smooth, color=color, lw=1.4, label=label)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("reward (train)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=len(ARMS))
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
