"""The report's plots of training: matplotlib figures as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_tlt.observe.report_data import RunData, StepTimeline, numbers
from megatron_tlt.observe.report_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PHASE_COLORS,
    RED,
    STYLE,
    legend,
    new_figure,
    plain_log,
    steps_axis,
    to_svg,
)
from megatron_tlt.observe.timeline import PHASES

MAX_BARS = 120


def plot_reward(run: RunData) -> str | None:
    """Training reward and held-out accuracy over steps."""
    lines: list[tuple[str, str, str, dict[str, Any]]] = [
        ("reward/mean", "reward (train)", BLUE, {"lw": 1.8}),
        ("reward/correct", "correct (train)", BLUE, {"lw": 1.2, "ls": ":"}),
        ("eval/pass_at_1", "held-out pass@1", GREEN, {"marker": "o", "ms": 4.5}),
        ("eval/pass_at_k", "held-out pass@k", GREEN, {"marker": "^", "ms": 4.5, "ls": "--", "lw": 1.2}),
        ("eval/greedy", "held-out greedy", ORANGE, {"marker": "s", "ms": 4, "ls": "--", "lw": 1.2}),
    ]
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        axes = figure.subplots()
        drawn: list[tuple[list[float], list[float]]] = []
        for name, label, color, style in lines:
            steps, values = run.series(name)
            if name == "reward/correct" and (steps, values) in drawn:
                continue  # for rewards of 0 or 1 both lines are the same
            if steps:
                axes.plot(steps, values, color=color, label=label, **style)
                drawn.append((steps, values))
        if not drawn:
            return None
        steps_axis(axes)
        legend(axes, 3)
        return to_svg(figure, "reward")


def plot_length_bands(run: RunData) -> str | None:
    """Response length over steps: median, the middle 80 %, 99th percentile, maximum."""
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        axes = figure.subplots()
        rows = [(row["step"], values) for row in run.lengths if (values := numbers(row.get("lengths")))]
        if rows:
            steps = [step for step, _ in rows]
            p10, p50, p90, p99, top = np.array([np.percentile(v, [10, 50, 90, 99, 100]) for _, v in rows]).T
            axes.fill_between(steps, p10, p90, color=BLUE, alpha=0.22, lw=0, label="10-90 %")
            axes.plot(steps, p50, color=BLUE, label="median")
            axes.plot(steps, p99, color=ORANGE, lw=1.2, ls="--", label="99 %")
            axes.plot(steps, top, color=RED, lw=1.2, label="longest")
        else:
            for name, color in (("median", BLUE), ("mean", ORANGE), ("max", RED)):
                steps, values = run.series(f"length/{name}")
                if steps:
                    axes.plot(steps, values, color=color, label=name)
            if not axes.lines:
                return None
        axes.set_ylabel("tokens")
        axes.set_ylim(bottom=0)
        steps_axis(axes)
        legend(axes)
        return to_svg(figure, "length_bands")


def plot_length_histogram(run: RunData) -> str | None:
    """Lengths of all responses; counts on a logarithmic axis, so that the tail is visible."""
    lengths = run.all_lengths()
    if not lengths:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        axes = figure.subplots()
        axes.hist(lengths, bins=min(60, max(5, int(max(lengths)))), color=BLUE, edgecolor=INK["card"], lw=0.4)
        plain_log(axes)
        axes.set_ylim(bottom=0.7)
        median, p99, top = np.percentile(lengths, [50, 99, 100])
        for value, label, style in ((median, "median", "-"), (p99, "99 %", "--"), (top, "longest", ":")):
            axes.axvline(value, color=RED, lw=1.3, ls=style, label=f"{label} {value:.0f}")
        axes.set_xlabel("tokens per response")
        axes.set_ylabel("responses")
        legend(axes)
        return to_svg(figure, "length_histogram")


def plot_phase_times(run: RunData) -> str | None:
    """Seconds per step, stacked by phase; the idle part of rollout (mean over ranks) is hatched."""
    rows = [row for row in run.metrics if any(key.startswith("time/") for key in row)]
    if not rows:
        return None

    def column(name: str) -> np.ndarray:
        return np.array([float(row.get(f"time/{name}") or 0.0) for row in rows])

    times = {name: column(name) for name in PHASES}
    times["rollout"] = np.maximum(times["rollout"] - times["idle"], 0.0)
    times["other"] = np.maximum(column("total") - np.sum(list(times.values()), axis=0), 0.0)
    steps = np.array([float(row["step"]) for row in rows])
    # Long runs: neighbouring steps are averaged into one bar.
    groups = np.array_split(np.arange(len(rows)), min(len(rows), MAX_BARS))
    width = 0.8 * (np.median(np.diff([steps[g].mean() for g in groups])) if len(groups) > 1 else 1.0)
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        axes = figure.subplots()
        bottom = np.zeros(len(groups))
        for name, values in times.items():
            height = np.array([values[g].mean() for g in groups])
            if not height.any():
                continue
            axes.bar(
                [steps[g].mean() for g in groups],
                height,
                width,
                bottom=bottom,
                label=name.replace("_", "-"),
                color=PHASE_COLORS[name],
                **_hatch(name),
            )
            bottom += height
        axes.set_ylabel("seconds")
        axes.grid(axis="x", visible=False)
        steps_axis(axes)
        legend(axes, 5)
        return to_svg(figure, "phase_times")


def _hatch(category: str) -> dict[str, Any]:
    return {"hatch": "////", "edgecolor": INK["muted"], "linewidth": 0} if category == "idle" else {"linewidth": 0}


def plot_mismatch(run: RunData) -> str | None:
    """Rollout against actor log-probabilities over steps, logarithmic."""
    kinds = (
        ("max_abs", "largest |difference|", RED),
        ("mean_abs", "mean |difference|", BLUE),
        ("k3_kl", "k3 KL", GREEN),
    )
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        axes = figure.subplots()
        for name, label, color in kinds:
            steps, values = run.series(f"mismatch/{name}")
            # A logarithmic axis cannot show zero; the k3 of exact agreement may round below it.
            shown = [(s, v) for s, v in zip(steps, values, strict=True) if v > 0]
            if shown:
                axes.plot(*zip(*shown, strict=True), color=color, label=label)
        if not axes.lines:
            return None
        plain_log(axes)
        steps_axis(axes)
        legend(axes)
        return to_svg(figure, "mismatch")


def plot_training(run: RunData) -> str | None:
    """Small plots of metrics from the optimizer and the engines."""
    names = {
        "actor/loss": "loss",
        "actor/grad_norm": "gradient norm",
        "actor/entropy": "entropy (nats)",
        "actor/kl": "KL to the reference",
        "actor/clip_fraction": "clipped tokens (share)",
        "actor/lr": "learning rate",
        "rollout/tokens_per_s": "generated tokens per second",
        "memory/peak_gib": "peak memory (GiB)",
    }
    found = [(label, *run.series(name)) for name, label in names.items() if run.series(name)[0]]
    if not found:
        return None
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    with matplotlib.rc_context({**STYLE, "lines.linewidth": 1.5}):
        figure = new_figure(height=1.85 * lines + 0.1, width=13.0 * columns / 4)
        figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)  # type: ignore[union-attr,call-arg]
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes in grid[len(found) :]:
            axes.set_visible(False)
        for axes, (label, steps, values) in zip(grid, found, strict=False):
            axes.plot(steps, values, color=BLUE)
            axes.set_title(label, loc="left")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        return to_svg(figure, "training")


def plot_timeline(timeline: StepTimeline) -> str:
    """A Gantt chart of one step: a row per rank and track; below it the running batch, if counted."""
    rows = {row: index for index, row in enumerate(timeline.rows)}
    running = next((c for name, c in timeline.counters.items() if "running" in name), None)
    height = 0.34 * len(rows) + 0.9
    with matplotlib.rc_context(STYLE):
        figure = new_figure(height + (1.35 if running else 0), 13.0)
        if running:
            axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[height, 1.3])
            _plot_running(below, running)
        else:
            axes = below = figure.subplots()
        labelled: set[str] = set()
        # Parents come first in the trace, so a nested span is drawn over its parent.
        for bar in timeline.bars:
            category = bar.category if bar.category in PHASE_COLORS else "other"
            label = None if category in labelled else category.replace("_", "-")
            labelled.add(category)
            axes.broken_barh(
                [(bar.start, bar.duration)],
                (rows[bar.row] - 0.36, 0.72),
                facecolor=PHASE_COLORS[category],
                label=label,
                **_hatch(category),
            )
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.005)
        below.set_xlabel(f"seconds since the start of step {timeline.step}")
        legend(axes, 10)
        return to_svg(figure, "timeline")


def _plot_running(axes: Any, running: dict[int, list[tuple[float, float]]]) -> None:
    colors: Sequence[str] = (BLUE, ORANGE, GREEN, RED)
    for index, (rank, points) in enumerate(sorted(running.items())):
        points.sort()
        label = f"rank {rank}" if len(running) <= 8 else None
        axes.plot(*zip(*points, strict=True), drawstyle="steps-post", color=colors[index % 4], lw=1.2, label=label)
    axes.set_ylabel("running")
    axes.set_ylim(bottom=0)
    if len(running) <= 8:
        axes.legend(loc="upper right", ncols=4)
