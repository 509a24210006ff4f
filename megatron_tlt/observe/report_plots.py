"""The report's plots of training: matplotlib figures as inline SVG."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_tlt.observe.report_data import RunData, StepTimeline, numbers
from megatron_tlt.observe.report_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PHASE_COLORS,
    RED,
    draw_series,
    legend,
    plain_log,
    plotted,
    steps_axis,
)
from megatron_tlt.observe.timeline import PHASES

MAX_BARS = 120
_TASK = "task/"
_TASK_COLORS = tuple(
    PHASE_COLORS[n] for n in ("rollout", "log_probs", "update", "reshard", "reward", "evaluate", "drafter")
)
MAX_TASKS = len(_TASK_COLORS)
"""Maximum number of tasks drawn: those with the most responses."""


@plotted("reward")
def plot_reward(figure: Figure, run: RunData) -> None:
    """Training reward and held-out accuracy over steps."""
    axes = figure.subplots()
    draw_series(axes, run, "reward/mean", label="reward (train)", color=BLUE, lw=1.8)
    if run.series("reward/correct") != run.series("reward/mean"):  # for rewards of 0 or 1 both lines are the same
        draw_series(axes, run, "reward/correct", label="correct (train)", color=BLUE, lw=1.2, ls=":")
    draw_series(axes, run, "eval/pass_at_1", label="held-out pass@1", color=GREEN, marker="o", ms=4.5)
    dashed = {"ls": "--", "lw": 1.2}
    draw_series(axes, run, "eval/pass_at_k", label="held-out pass@k", color=GREEN, marker="^", ms=4.5, **dashed)
    draw_series(axes, run, "eval/greedy", label="held-out greedy", color=ORANGE, marker="s", ms=4, **dashed)
    steps_axis(axes)
    legend(axes, 3)


@plotted("length_bands")
def plot_length_bands(figure: Figure, run: RunData) -> None:
    """Response length over steps: median, the middle 80 %, 99th percentile, maximum."""
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
            draw_series(axes, run, f"length/{name}", color=color, label=name)
    axes.set_ylabel("tokens")
    axes.set_ylim(bottom=0)
    steps_axis(axes)
    legend(axes)


@plotted("length_histogram")
def plot_length_histogram(figure: Figure, run: RunData) -> None:
    """Lengths of all responses; counts on a logarithmic axis, so that the tail is visible."""
    lengths = run.all_lengths()
    if not lengths:
        return
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


@plotted("phase_times")
def plot_phase_times(figure: Figure, run: RunData) -> None:
    """Seconds per step, stacked by phase; the idle part of rollout (mean over ranks) is hatched."""
    rows = [row for row in run.metrics if any(key.startswith("time/") for key in row)]
    if not rows:
        return

    def column(name: str) -> np.ndarray:
        return np.array([float(row.get(f"time/{name}") or 0.0) for row in rows])

    times = {name: column(name) for name in PHASES}
    times["rollout"] = np.maximum(times["rollout"] - times["idle"], 0.0)
    times["other"] = np.maximum(column("total") - np.sum(list(times.values()), axis=0), 0.0)
    steps = np.array([float(row["step"]) for row in rows])
    # Long runs: neighbouring steps are averaged into one bar.
    groups = np.array_split(np.arange(len(rows)), min(len(rows), MAX_BARS))
    places = [steps[group].mean() for group in groups]
    width = 0.8 * (np.median(np.diff(places)) if len(groups) > 1 else 1.0)
    axes = figure.subplots()
    bottom = np.zeros(len(groups))
    for name, values in times.items():
        height = np.array([values[group].mean() for group in groups])
        if height.any():
            style = {"label": name.replace("_", "-"), "color": PHASE_COLORS[name], **_hatch(name)}
            axes.bar(places, height, width, bottom=bottom, **style)
            bottom += height
    axes.set_ylabel("seconds")
    axes.grid(axis="x", visible=False)
    steps_axis(axes)
    legend(axes, 5)


def _hatch(category: str) -> dict[str, Any]:
    return {"hatch": "////", "edgecolor": INK["muted"], "linewidth": 0} if category == "idle" else {"linewidth": 0}


@plotted("mismatch")
def plot_mismatch(figure: Figure, run: RunData) -> None:
    """Rollout against actor log-probabilities over steps, logarithmic."""
    axes = figure.subplots()
    labels = {"max_abs": "largest |difference|", "mean_abs": "mean |difference|", "k3_kl": "k3 KL"}
    for (name, label), color in zip(labels.items(), (RED, BLUE, GREEN), strict=True):
        # A logarithmic axis cannot show zero; the k3 of exact agreement may round below it.
        shown = [(s, v) for s, v in zip(*run.series(f"mismatch/{name}"), strict=True) if v > 0]
        if shown:
            axes.plot(*zip(*shown, strict=True), color=color, label=label)
    plain_log(axes)
    steps_axis(axes)
    legend(axes)


_TRAINING = {
    "actor/loss": "loss",
    "actor/grad_norm": "gradient norm",
    "actor/entropy": "entropy (nats)",
    "actor/kl": "KL to the reference (nats)",
    "actor/policy_kl": "KL to the policy before the step",
    "actor/clip_fraction": "clipped tokens (share)",
    "actor/lr": "learning rate",
    "advantage/std": "advantage, standard deviation",
    "reward/group_std": "reward, standard deviation in a group",
    "rollout/tokens_per_s": "generated tokens per second",
    "tokens/per_s_per_device": "tokens per second and device",
    "memory/peak_gib": "peak memory (GiB)",
}


def constant_metrics(run: RunData) -> dict[str, float]:
    """The metrics of ``plot_training`` that have one value in all steps, by title; they are not drawn."""
    values = {title: {*run.series(name)[1]} for name, title in _TRAINING.items()}
    return {title: found.pop() for title, found in values.items() if len(found) == 1}


@plotted("training")
def plot_training(figure: Figure, run: RunData) -> None:
    """Small plots of metrics from the optimizer and the engines."""
    constant = constant_metrics(run)
    found = [name for name, title in _TRAINING.items() if run.series(name)[0] and title not in constant]
    if not found:
        return
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    figure.set_size_inches(13.0 * columns / 4, 1.85 * lines + 0.1)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.08)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    for axes, name in zip(grid, found, strict=False):
        draw_series(axes, run, name, color=BLUE, lw=1.5)
        axes.set_title(_TRAINING[name], loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


@plotted("timeline")
def plot_timeline(figure: Figure, timeline: StepTimeline | None) -> None:
    """A Gantt chart of one step: a row per rank and track; below it the running batch, if counted."""
    if timeline is None:
        return
    rows = {row: index for index, row in enumerate(timeline.rows)}
    running = next((c for name, c in timeline.counters.items() if "running" in name), None)
    height = 0.34 * len(rows) + 0.9
    figure.set_size_inches(13.0, height + (1.35 if running else 0))
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
        style = {"facecolor": PHASE_COLORS[category], "label": label, **_hatch(category)}
        axes.broken_barh([(bar.start, bar.duration)], (rows[bar.row] - 0.36, 0.72), **style)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.005)
    below.set_xlabel(f"seconds since the start of step {timeline.step}")
    legend(axes, 10)


def _plot_running(axes: Any, running: dict[int, list[tuple[float, float]]]) -> None:
    colors = (BLUE, ORANGE, GREEN, RED)
    for index, (rank, points) in enumerate(sorted(running.items())):
        label = f"rank {rank}" if len(running) <= 8 else None
        style = {"color": colors[index % 4], "lw": 1.2, "label": label}
        axes.plot(*zip(*sorted(points), strict=True), drawstyle="steps-post", **style)
    axes.set_ylabel("running")
    axes.set_ylim(bottom=0)
    if len(running) <= 8:
        axes.legend(loc="upper right", ncols=4)


def tasks_of(run: RunData) -> list[str]:
    """The tasks in a run's metrics, those with the most responses first."""
    responses: Counter[str] = Counter()
    for row in run.metrics:
        for key, value in row.items():
            if key.startswith(_TASK) and key.endswith("/responses"):
                responses[key.removeprefix(_TASK).removesuffix("/responses")] += value or 0
    return sorted(responses, key=lambda task: (-responses[task], task))


@plotted("tasks", width=13.0)
def plot_tasks(figure: Figure, run: RunData) -> None:
    """Left: reward (lines) and held-out pass@1 (dots) over steps. Right: mean response length."""
    left, right = figure.subplots(1, 2)
    for task, color in zip(tasks_of(run), _TASK_COLORS, strict=False):
        # matplotlib reads $ as a formula, and hides a label with a leading _ from the legend
        name, shown = f"{_TASK}{task}", task.replace("$", r"\$").removeprefix("_")
        draw_series(left, run, f"{name}/reward", color=color, label=shown)
        draw_series(left, run, f"{name}/eval_pass_at_1", color=color, marker="o", ms=4.5, ls="--", lw=1.2)
        draw_series(right, run, f"{name}/length_mean", color=color, label=shown)
    left.set_ylabel("reward; dots: held-out pass@1")
    right.set_ylabel("tokens per response")
    for axes in (left, right):
        steps_axis(axes)
        if axes.lines:
            legend(axes)
