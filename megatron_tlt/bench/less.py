"""What a policy learns from few problems: easy or mixed ones, 100 to 500 of them, at fixed steps and at fixed epochs.

Repeats the study Learning from Less on the launch config's policy; resumable.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.training_runs import Runs, add_run_arguments, finished_runs, kept_result
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.report_data import RunData
from megatron_tlt.platform.files import atomic_write_bytes
from megatron_tlt.tasks.pool import TIERS

MIXES: dict[str, dict[str, int]] = {"easy": {"easy": 1}, "mixed": {"easy": 1, "medium": 1, "hard": 1}}
SIZES = (100, 200, 500)
TESTED = 200
"""Held-out problems of each tier."""
STEPS = 75
EVERY = 15
EPOCHS = 1.2
COLLAPSED = 0.8
"""A run has collapsed if its last pass rate is below so much of its best."""
STEEP = 10.0
"""A gradient is steep if its norm is so many times the median of its run."""
_COLLAPSES = "runs that collapsed"
_DRAWS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "runs/less")
    parser.set_defaults(config=Path("launch/less-cpu.yaml"))
    parser.add_argument("--problems", type=int, default=2800, help="problems whose pass rate is measured (%(default)s)")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per mixture, size and table; targets: a mixture of 100 is worth more easy problems, and no run collapses.

    Raises:
        ConfigError: the config has not one task of kind procedural, the epochs of a pool do not end at an evaluation,
            or an existing run has other settings.
        RunError: a run failed.
    """
    began = time.monotonic()
    found: dict[tuple[str, int], RunData] = {}
    config = load_config(arguments.config, arguments.set)
    if len(config.tasks) != 1 or config.tasks[0].kind != "procedural":
        raise ConfigError(f"{arguments.config}: found tasks of another kind; allowed: one of kind procedural")
    _check_ends(config.trainer.prompts_per_step)
    for seed in arguments.seeds:
        tiers = {split: arguments.folder / f"tiers-{split}-{seed}.json" for split in ("train", "held_out")}
        left = arguments.minutes - (time.monotonic() - began) / 60
        if left <= 0 and not all(file.is_file() for file in tiers.values()):
            continue
        for split, file in tiers.items():
            problems = arguments.problems if split == "train" else arguments.problems // 2
            _calibrate(arguments, file, split, seed, problems)
        limited = argparse.Namespace(**{**vars(arguments), "seeds": [seed], "minutes": left})
        limited.set = [*arguments.set, *_common(config, tiers["held_out"])]
        found |= finished_runs(limited, _arms(config, tiers["train"]))
    if arguments.json is not None and found:
        atomic_write_bytes(arguments.json.with_suffix(".svg"), plot(found))
    return judge(found, arguments.seeds, config.trainer.prompts_per_step)


def _end_of_epochs(size: int, prompts_per_step: int) -> int:
    """The step at which a pool's epochs end."""
    return round(EPOCHS * size / prompts_per_step)


def _check_ends(prompts_per_step: int) -> None:
    """Refuses pools whose epochs end at a step without an evaluation."""
    evaluated = range(EVERY, STEPS + 1, EVERY)
    for size in SIZES:
        if (end := _end_of_epochs(size, prompts_per_step)) not in evaluated:
            raise ConfigError(
                f"trainer.prompts_per_step: found {prompts_per_step}; {EPOCHS} epochs of {size} problems end at step "
                f"{end}, and the evaluations are at {', '.join(map(str, evaluated))}; allowed: 8"
            )


def _calibrate(arguments: argparse.Namespace, file: Path, split: str, seed: int, problems: int) -> None:
    sizes = ["--problems", str(problems), "--samples", "8", "--split", split]
    own = [*arguments.set, f"run.seed={seed}", f"run.dir={file.with_suffix('')}"]
    if kept_result(file, [str(arguments.config), *sizes, *own], load_config(arguments.config, own)):
        return
    command = [sys.executable, "-m", "megatron_tlt", "calibrate", str(arguments.config), "--out", str(file)]
    if subprocess.run([*command, *sizes, *own], check=False).returncode:
        raise RunError(f"a calibration failed; to see its output, run: {' '.join([*command[1:], *sizes, *own])}")


def _task(config: TltConfig, mix: Mapping[str, int], budget: int, file: Path) -> dict[str, Any]:
    fields = config.tasks[0].model_dump(mode="json", exclude_defaults=True)
    return {**fields, "budget": budget, "tier_file": str(file), "tier_mix": dict(mix)}


def _common(config: TltConfig, held_out: Path) -> list[str]:
    """Overrides of every run: its steps, and a set of held-out problems of each tier."""
    sets = [
        {
            "name": tier,
            "problems": TESTED,
            "samples": 1,
            "greedy": False,
            "tasks": [_task(config, {tier: 1}, TESTED, held_out)],
        }
        for tier in TIERS
    ]
    return [
        f"trainer.steps={STEPS}",
        f"evaluation.every={EVERY}",
        "evaluation.greedy=false",
        f"evaluation.sets={json.dumps(sets)}",
    ]


def _arms(config: TltConfig, train: Path) -> dict[str, list[str]]:
    return {
        f"{kind}-{size}": [f"tasks={json.dumps([_task(config, mix, size, train)])}"]
        for kind, mix in MIXES.items()
        for size in SIZES
    }


def pass_rates(data: RunData, step: float) -> list[float]:
    """Pass rates, with one sampled response each, on the held-out problems of each tier after a step."""
    rates = []
    for tier in TIERS:
        steps, values = data.series(f"eval/{tier}/pass_at_1")
        rates.append(values[steps.index(step)])
    return rates


def bootstrap(
    runs: Sequence[Sequence[float]], generator: np.random.Generator, draws: int = _DRAWS
) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the pass rates of an arm, (draws, tiers), and its means, (tiers).

    Seeds are drawn with replacement and, within each, its problems: a count of passes is then binomial.
    """
    rates = np.array(runs)
    seeds = generator.integers(len(rates), size=(draws, len(rates)))
    return generator.binomial(TESTED, rates[seeds]).mean(axis=1) / TESTED, rates.mean(axis=0)


def collapses(data: RunData) -> dict[str, float]:
    """Whether a run's pass rate fell, and how its gradients behaved."""
    curve = np.array([pass_rates(data, step) for step in data.series("eval/easy/pass_at_1")[0]]).mean(axis=1)
    norms = np.array(data.series("actor/grad_norm")[1])
    typical = max(float(np.median(norms[norms > 0])) if (norms > 0).any() else 1.0, 1e-12)
    return {
        "collapsed": float(curve[-1] < COLLAPSED * curve.max()),
        "steep gradients": float((norms > STEEP * typical).sum()),
        "steps without gradient": float((norms == 0).sum()),
    }


def worth_in_easy(easy: Sequence[float], mixed: float) -> float:
    """How many easy problems reach what a mixture does, by interpolation over the sizes.

    Infinite if none does; minus infinity if the fewest do better, as how few are enough is not known.
    """
    best = np.maximum.accumulate(easy)
    if mixed > best[-1]:
        return float("inf")
    if mixed < best[0]:
        return float("-inf")
    if mixed == best[0]:
        return float(SIZES[0])
    at = int(np.searchsorted(best, mixed))
    share = (mixed - best[at - 1]) / (best[at] - best[at - 1])
    return float(SIZES[at - 1] + share * (SIZES[at] - SIZES[at - 1]))


def _said(worth: float) -> str:
    """The result of :func:`worth_in_easy` in words: the JSON file has null for what is not finite."""
    if np.isinf(worth):
        return f"above {SIZES[-1]}" if worth > 0 else f"below {SIZES[0]}"
    return f"{worth:.0f}"


def judge(found: Runs, seeds: Sequence[int], prompts_per_step: int) -> BenchmarkResult:
    """Rows of the arms with at least one run in both tables; targets when all have run."""
    result = BenchmarkResult(environment=describe_environment(), name="less")
    means: dict[tuple[str, str], float] = {}
    draws: dict[tuple[str, str], np.ndarray] = {}
    generator = np.random.default_rng(0)
    complete = all((arm, seed) in found for arm in _names() for seed in seeds)
    for table in ("fixed steps", "fixed epochs"):
        for arm in _names():
            size = int(arm.partition("-")[2])
            runs = [found[arm, seed] for seed in seeds if (arm, seed) in found]
            if not runs:
                continue
            steps = STEPS if table == "fixed steps" else _end_of_epochs(size, prompts_per_step)
            drawn, rates = bootstrap([pass_rates(data, steps) for data in runs], generator)
            start = np.array([pass_rates(data, 0) for data in runs]).mean(axis=0)
            over_tiers = drawn.mean(axis=1)
            means[table, arm], draws[table, arm] = float(rates.mean()), over_tiers
            low, high = np.quantile(over_tiers, (0.025, 0.975))
            counted = [collapses(data) for data in runs] if table == "fixed steps" else []
            result.rows.append(
                {
                    "table": table,
                    "problems": arm,
                    "steps": steps,
                    "epochs": steps * prompts_per_step / size,
                    "runs": len(runs),
                    "pass rate": float(rates.mean()),
                    "low": float(low),
                    "high": float(high),
                    "gain": float(rates.mean() - start.mean()),
                    **{tier: float(rate) for tier, rate in zip(TIERS, rates, strict=True)},
                    **{name: sum(each[name] for each in counted) for name in (counted[0] if counted else ())},
                }
            )
    for table in ("fixed steps", "fixed epochs"):
        name = f"easy problems that mixed-100 is worth, over 100, {table}"
        if not complete:
            result.incomplete(name)
            continue
        easy = [means[table, f"easy-{size}"] for size in SIZES]
        worth = [
            worth_in_easy(of_sizes, mixed)
            for *of_sizes, mixed in zip(
                *(draws[table, arm] for arm in (*_names()[: len(SIZES)], "mixed-100")), strict=True
            )
        ]
        low, high = np.quantile(worth, (0.025, 0.975), method="nearest")  # some are infinite
        value = worth_in_easy(easy, means[table, "mixed-100"])
        result.rows.append(
            {
                "table": table,
                "problems": "easy ones that mixed-100 is worth",
                "low": low,
                "high": high,
                "worth": f"{_said(value)} ({_said(low)} to {_said(high)})",
            }
        )
        result.target(name, value / 100, ">=", 5.0)
        gain = draws[table, "mixed-100"] - draws[table, "easy-100"]
        result.target(
            f"share of draws in which mixed-100 beats easy-100, {table}", float((gain > 0).mean()), ">=", 0.95
        )
    if complete:
        fell = sum(collapses(found[arm, seed])["collapsed"] for arm in _names() for seed in seeds)
        result.target(_COLLAPSES, fell, "==", 0)
    else:
        result.incomplete(_COLLAPSES)
    return result


def _names() -> list[str]:
    return [f"{kind}-{size}" for kind in MIXES for size in SIZES]


def plot(found: Runs) -> bytes:
    """The SVG of the pass rate over tiers against steps: the mean of each arm over its seeds."""
    import matplotlib

    from megatron_tlt.observe.report_style import CURVE_COLORS, STANDALONE, new_figure, steps_axis

    buffer = io.BytesIO()
    with matplotlib.rc_context({**STANDALONE, "svg.hashsalt": "less"}):
        figure = new_figure(height=3.0, width=9.0)
        shown = list(figure.subplots(1, len(MIXES), sharey=True))
        for axes, kind in zip(shown, MIXES, strict=True):
            for size, color in zip(SIZES, CURVE_COLORS, strict=False):
                runs = [data for (arm, _), data in sorted(found.items()) if arm == f"{kind}-{size}"]
                if not runs:
                    continue
                steps = runs[0].series("eval/easy/pass_at_1")[0]
                curves = np.array([[np.mean(pass_rates(data, step)) for step in steps] for data in runs])
                axes.plot(steps, curves.mean(0), color=color, lw=1.8, label=f"{size} problems")
                axes.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.15, lw=0)
            axes.set_title(kind)
            axes.set_ylabel("held-out pass rate")
            steps_axis(axes)
        figure.legend(*shown[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(SIZES))
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
