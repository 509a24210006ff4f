"""A page that compares runs: curves over steps and over time, final figures, and the keys in which they differ."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from megatron_tlt.observe.page import render_page
from megatron_tlt.observe.report_data import RunData, is_number, load_run
from megatron_tlt.observe.report_style import CURVE_COLORS, legend, plotted, steps_axis
from megatron_tlt.observe.summary import flatten, time_totals, tokens_per_s
from megatron_tlt.platform.files import atomic_write_text

MAX_RUNS = len(CURVE_COLORS)
_CURVES = {
    "reward/mean": "Reward",
    "eval/pass_at_1": "Held-out pass@1",
    "length/mean": "Response length (tokens)",
    "time/total": "Seconds per step",
    "time/rollout": "Seconds of rollout",
    "speculation/acceptance_length": "Acceptance length (tokens)",
    "actor/entropy": "Entropy (nats per token)",
    "actor/grad_norm": "Gradient norm",
}
_OVER_TIME = ("reward/mean", "eval/pass_at_1")
_NOT_COMPARED = ("run.name", "run.dir")


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page for the runs in ``folders``, up to ``MAX_RUNS``; returns its path.

    Raises:
        RunError: a folder does not exist, or the page cannot be written.
    """
    runs = [load_run(folder, traced=False) for folder in folders]
    for run, name in zip(runs, names_of(folders), strict=True):
        run.name = name
    cards = [
        (title, "over steps", svg)
        for number, (metric, title) in enumerate(_CURVES.items())
        if (svg := _plot_steps(f"steps{number}", runs, metric)) is not None
    ]
    cards += [
        (_CURVES[metric], "over minutes of training", svg)
        for number, metric in enumerate(_OVER_TIME)
        if (svg := _plot_minutes(f"minutes{number}", runs, metric)) is not None
    ]
    page = render_page(
        "compare",
        names=[run.name for run in runs],
        cards=[(title, caption, Markup(svg)) for title, caption, svg in cards],
        notes=[f"{run.name}: {note}" for run in runs for note in run.notes],
        figures=figures_of(runs),
        differences=differences_of(runs),
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    atomic_write_text(out, page)
    return out


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents' as make them differ; numbers if the folders are the same."""
    whole = [folder.resolve() for folder in folders]
    for depth in itertools.count(1):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len({*names}) == len(names):
            return names
        if depth > max(len(path.parts) for path in whole):
            seen: Counter[str] = Counter()
            for index, name in enumerate(names):
                seen[name] += 1
                names[index] = f"{whole[index].name} ({seen[name]})"
            return names
    raise AssertionError


def figures_of(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Final figures: title -> one value for each run."""

    def last(name: str) -> list[Any]:
        return [values[-1] if (values := run.series(name)[1]) else None for run in runs]

    times = [time_totals(run.metrics) if run.metrics else {} for run in runs]
    rows: dict[str, list[Any]] = {
        "steps": [int(run.metrics[-1]["step"]) if run.metrics else None for run in runs],
        "reward, last step": last("reward/mean"),
        "held-out pass@1, last": last("eval/pass_at_1"),
        "held-out pass@k, last": last("eval/pass_at_k"),
        "minutes in all": [seconds / 60 if (seconds := found.get("total")) else None for found in times],
        "minutes of rollout": [seconds / 60 if (seconds := found.get("rollout")) else None for found in times],
        "generated tokens per second": [tokens_per_s(run.metrics) for run in runs],
        "acceptance length, last step": last("speculation/acceptance_length"),
        "gain from speculation, last step": last("speculation/gain"),
    }
    return {title: values for title, values in rows.items() if any(value is not None for value in values)}


def differences_of(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """The config's keys that are not the same in all runs: key -> one value for each run; None: absent."""
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each if key not in _NOT_COMPARED)
    rows = {key: [each.get(key) for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _plot_steps(name: str, runs: Sequence[RunData], metric: str) -> str | None:
    @plotted(name)
    def plot(figure: Figure, _: None) -> None:
        axes = figure.subplots()
        for run, color in zip(runs, CURVE_COLORS, strict=False):
            steps, values = run.series(metric)
            if steps:
                axes.plot(steps, values, color=color, label=run.name, marker="o" if len(steps) < 12 else None, ms=3.5)
        if axes.has_data():
            steps_axis(axes)
            legend(axes, 2)

    return plot(None)


def _plot_minutes(name: str, runs: Sequence[RunData], metric: str) -> str | None:
    @plotted(name)
    def plot(figure: Figure, _: None) -> None:
        axes = figure.subplots()
        for run, color in zip(runs, CURVE_COLORS, strict=False):
            minutes, values = _over_minutes(run, metric)
            if minutes:
                axes.plot(
                    minutes, values, color=color, label=run.name, marker="o" if len(minutes) < 12 else None, ms=3.5
                )
        if axes.has_data():
            axes.set_xlabel("minutes of steps, evaluations left out")
            legend(axes, 2)

    return plot(None)


def _over_minutes(run: RunData, metric: str) -> tuple[list[float], list[float]]:
    """The metric over the time that the steps until then took; pauses between two starts are not in it."""
    minutes, values, spent = [], [], 0.0
    for row in run.metrics:
        if is_number(row.get("time/total")):
            spent += row["time/total"] / 60
        if is_number(row.get(metric)):
            minutes.append(spent)
            values.append(float(row[metric]))
    return minutes, values
