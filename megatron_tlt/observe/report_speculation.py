"""The report's plots of speculation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_tlt.observe.metrics import LENGTH_CLASSES
from megatron_tlt.observe.report_data import RunData, Stretch, numbers
from megatron_tlt.observe.report_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PHASE_COLORS,
    RED,
    draw_series,
    legend,
    no_speculation,
    plotted,
    steps_axis,
)

_CLASS_COLORS = (GREEN, ORANGE, RED)
_STRATEGY_COLORS = (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    *(PHASE_COLORS[n] for n in ("reward", "evaluate", "drafter", "checkpoint", "other")),
)
_POSITION_COLORS = (BLUE, GREEN, ORANGE, RED)


@plotted("acceptance")
def plot_acceptance(figure: Figure, run: RunData) -> None:
    """Tokens per decode step over steps, with the middle 80 % of the responses."""
    rows = [(row["step"], found) for row in run.lengths if (found := numbers(row.get("acceptance")))]
    axes = figure.subplots()
    if rows:
        low, high = np.array([np.percentile(found, [10, 90]) for _, found in rows]).T
        steps = [step for step, _ in rows]
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.22, lw=0, label="10-90 % of responses")
    draw_series(axes, run, "speculation/acceptance_length", color=BLUE, label="all tokens")
    if axes.has_data():
        no_speculation(axes, "no speculation")
        axes.set_ylabel("tokens per decode step")
        steps_axis(axes)
        legend(axes)


@plotted("gain")
def plot_gain(figure: Figure, run: RunData) -> None:
    """Speed-up of rollouts by speculation over steps; with several engines also each engine's."""
    if not run.series("speculation/gain")[0]:
        return
    axes = figure.subplots()
    for engine in itertools.count():
        name = f"speculation/gain_engine_{engine}"
        if not run.series(name)[0]:
            break
        draw_series(axes, run, name, color=INK["muted"], lw=0.8, label=None if engine else "single engine")
    draw_series(axes, run, "speculation/gain", color=BLUE, marker=".", label="rollout")
    no_speculation(axes, "no speculation")
    axes.set_ylabel("time without, over with")
    steps_axis(axes)
    legend(axes)


@plotted("drafts", width=13.0)
def plot_drafts(figure: Figure, run: RunData) -> None:
    """Share of drafts accepted by position, and acceptance length by length class, over drafter versions.

    The x axis is the step if the drafter is not trained.
    """
    trained = bool(run.series("speculation/drafter_version")[0])
    left, right = figure.subplots(1, 2)
    for position, color in enumerate(itertools.cycle(_POSITION_COLORS), 1):
        name = f"speculation/accepted_at_{position}"
        if not run.series(name)[0]:
            break
        _plot_over_versions(left, run, name, trained, color=color, label=f"draft {position}")
    for found, color in zip(LENGTH_CLASSES, _CLASS_COLORS, strict=True):
        _plot_over_versions(right, run, f"speculation/acceptance_length_{found}", trained, color=color, label=found)
    left.set_ylabel("share of drafts accepted")
    left.set_ylim(0, 1)
    right.set_ylabel("tokens per decode step")
    for axes in (left, right):
        steps_axis(axes)
        if trained:
            axes.set_xlabel("drafter version (optimizer steps)")
        legend(axes)


def _plot_over_versions(axes: Axes, run: RunData, name: str, trained: bool, color: str, label: str) -> None:
    steps, values = run.series(name)
    versions = dict(zip(*run.series("speculation/drafter_version"), strict=True)) if trained else {s: s for s in steps}
    shown = [(versions[step], value) for step, value in zip(steps, values, strict=True) if step in versions]
    if shown:
        axes.plot(*zip(*shown, strict=True), marker=".", color=color, label=label)


@plotted("history")
def plot_history(figure: Figure, run: RunData) -> None:
    """The suffix trees' history over steps: responses in memory, and the acceptance of drafts from them."""
    steps, held = run.series("speculation/suffix_mib")
    if not steps:
        return
    above, below = figure.subplots(2, 1, sharex=True)
    above.fill_between(steps, held, color=GREEN, alpha=0.35, lw=0)
    above.set_ylabel("history (MiB)")
    above.set_ylim(bottom=0)
    draw_series(below, run, "speculation/acceptance_length_suffix", color=BLUE, marker=".")
    no_speculation(below)
    below.set_ylabel("tokens per draft\nand verification")
    steps_axis(below)


@plotted("strategies", height=3.6, width=13.0)
def plot_strategies(figure: Figure, stretches: Sequence[Stretch]) -> None:
    """One rollout: the running batch over time with the active strategy, and tokens per request and step."""
    if not stretches:
        return
    speculating = sorted({stretch.strategy for stretch in stretches} - {"off"})
    colors = {"off": PHASE_COLORS["idle"], **dict(zip(speculating, itertools.cycle(_STRATEGY_COLORS), strict=False))}
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.7, 1.0])
    top = max(one.batch for one in stretches) * 1.05
    for name, color in colors.items():
        spans = [(one.start, one.duration) for one in stretches if one.strategy == name]
        if spans:
            above.broken_barh(spans, (0, top), facecolor=color, alpha=0.35, lw=0, label=name)
    edges = [stretches[0].start, *(one.start + one.duration for one in stretches)]
    above.stairs([one.batch for one in stretches], edges, color=INK["text"], lw=1.4, baseline=None)
    above.set_ylabel("running requests")
    above.set_ylim(bottom=0)
    below.stairs([one.tokens_per_request for one in stretches], edges, color=BLUE, lw=1.2, baseline=None)
    no_speculation(below)
    below.set_ylabel("tokens per\nrequest, step")
    below.set_xlabel("seconds since the first engine step")
    above.margins(x=0.005)
    legend(above, 10)
