"""Reward curves with and without speculation over several seeds: a plot and a test of means; resumable.

The runs use ``tlt train``, which resumes an earlier run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.config.loader import compare_resolved, load_config
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.report_data import CONFIG_FILE, RunData, load_run
from megatron_tlt.observe.summary import SUMMARY_FILE
from megatron_tlt.platform.files import atomic_write_bytes

ARMS: dict[str, list[str]] = {
    "with": [],
    "without": ["speculation.enabled=false", "spot=null", "drafter=null"],
}
LATE = 1.0 / 3.0
"""Share of the steps, at the end, whose training reward is compared."""
LEVEL = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=Path("launch/quickstart-cpu.yaml"), help="launch config")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds, one run per arm each")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no later run; run again for the rest")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per run; targets: the means of both arms do not differ significantly, at the level of 5 %.

    Raises:
        ConfigError: the config is unreadable, or an existing run has other settings.
        RunError: a run failed.
    """
    steps = load_config(arguments.config, arguments.set).trainer.steps
    began, found = time.monotonic(), {}
    for seed in arguments.seeds:
        for arm, overrides in ARMS.items():
            folder = arguments.folder / f"{arm}-{seed}"
            own = [f"run.name={arm}-{seed}", f"run.dir={folder}", f"run.seed={seed}"]
            chosen = [*arguments.set, *overrides, *own]
            if _is_done(folder, steps):
                if changed := compare_resolved(folder / CONFIG_FILE, load_config(arguments.config, chosen)):
                    raise ConfigError(
                        f"{folder}: a run with other settings: {'; '.join(changed)}; allowed: the same, or another "
                        "--folder"
                    )
            elif time.monotonic() - began > 60 * arguments.minutes:
                continue
            else:
                _train(arguments.config, chosen)
            found[arm, seed] = load_run(folder)
    result = judge(found, arguments.seeds)
    if arguments.json is not None and found:
        atomic_write_bytes(arguments.json.with_suffix(".svg"), plot(found))
    return result


def _is_done(folder: Path, steps: int) -> bool:
    try:
        return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["steps"] == steps
    except (OSError, ValueError, KeyError):
        return False


def _train(config: Path, overrides: Sequence[str]) -> None:
    command = [sys.executable, "-m", "megatron_tlt", "train", str(config), *overrides]
    if subprocess.run(command, check=False).returncode:
        raise RunError(f"learning: a run failed; to see its output, run: {' '.join(command[1:])}")


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


def judge(found: Mapping[tuple[str, int], RunData], seeds: Sequence[int]) -> BenchmarkResult:
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


def plot(found: Mapping[tuple[str, int], RunData]) -> bytes:
    """The SVG of the runs' curves: each arm's mean over seeds, between its minimum and maximum."""
    import io

    import matplotlib

    from megatron_tlt.observe.report_style import BLUE, ORANGE, STANDALONE, legend, new_figure, steps_axis

    buffer = io.BytesIO()
    with matplotlib.rc_context({**STANDALONE, "svg.hashsalt": "learning"}):
        figure = new_figure(height=3.0, width=9.0)
        panels = zip(figure.subplots(1, 2), ("reward/mean", "eval/pass_at_1"), strict=True)
        for axes, metric in panels:
            for arm, color in zip(ARMS, (BLUE, ORANGE), strict=True):
                curves = [data.series(metric) for (of, _), data in sorted(found.items()) if of == arm]
                if not curves:
                    continue
                shortest = min(len(steps) for steps, _ in curves)
                steps, rewards = curves[0][0][:shortest], np.array([values[:shortest] for _, values in curves])
                axes.plot(steps, rewards.mean(0), color=color, lw=1.8, label=f"{arm} speculation")
                axes.fill_between(steps, rewards.min(0), rewards.max(0), color=color, alpha=0.2, lw=0)
            axes.set_ylabel({"reward/mean": "reward (train)", "eval/pass_at_1": "held-out pass@1"}[metric])
            steps_axis(axes)
            legend(axes, 2)
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
