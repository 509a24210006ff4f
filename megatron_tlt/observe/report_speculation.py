"""The report's plots of speculation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from megatron_tlt.observe.metrics import LENGTH_CLASSES
from megatron_tlt.observe.report_data import RunData, Stretch, numbers
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
    steps_axis,
    to_svg,
)

_CLASS_COLORS = (GREEN, ORANGE, RED)
STRATEGY_COLORS = (
    PHASE_COLORS["idle"],
    BLUE,
    GREEN,
    ORANGE,
    RED,
    *(PHASE_COLORS[n] for n in ("reward", "evaluate", "drafter", "checkpoint", "other")),
)
_POSITION_COLORS = (BLUE, GREEN, ORANGE, RED)


def plot_acceptance(run: RunData) -> str | None:
    """Tokens per decode step over steps, with the middle 80 % of the responses."""
    steps, values = run.series("speculation/acceptance_length")
    rows = [(row["step"], found) for row in run.lengths if (found := numbers(row.get("acceptance")))]
    if not steps and not rows:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        axes = figure.subplots()
        if rows:
            low, high = np.array([np.percentile(found, [10, 90]) for _, found in rows]).T
            axes.fill_between(
                [s for s, _ in rows], low, high, color=BLUE, alpha=0.22, lw=0, label="10-90 % of responses"
            )
        if steps:
            axes.plot(steps, values, color=BLUE, label="all tokens")
        axes.axhline(1.0, color=INK["muted"], lw=1.0, ls=":", label="no speculation")
        axes.set_ylabel("tokens per decode step")
        steps_axis(axes)
        legend(axes)
        return to_svg(figure, "acceptance")


def plot_gain(run: RunData) -> str | None:
    """Speed-up of rollouts by speculation over steps; with several engines also each engine's."""
    steps, gains = run.series("speculation/gain")
    if not steps:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        axes = figure.subplots()
        engine = 0
        while (found := run.series(f"speculation/gain_engine_{engine}")) and found[0]:
            axes.plot(*found, color=INK["muted"], lw=0.8, label=None if engine else "single engine")
            engine += 1
        axes.plot(steps, gains, color=BLUE, marker=".", label="rollout")
        axes.axhline(1.0, color=INK["muted"], lw=1.0, ls=":", label="no speculation")
        axes.set_ylabel("time without, over with")
        steps_axis(axes)
        legend(axes)
        return to_svg(figure, "gain")


def plot_drafts(run: RunData) -> str | None:
    """Share of drafts accepted by position, and acceptance length by length class, over drafter versions.

    The x axis is the step if the drafter is not trained.
    """
    trained = bool(run.series("speculation/drafter_version")[0])
    with matplotlib.rc_context(STYLE):
        figure = new_figure(width=13.0)
        left, right = figure.subplots(1, 2)
        position = 1
        while (name := f"speculation/accepted_at_{position}") and run.series(name)[0]:
            color = _POSITION_COLORS[(position - 1) % len(_POSITION_COLORS)]
            _plot_over_versions(left, run, name, trained, color=color, label=f"draft {position}")
            position += 1
        for found, color in zip(LENGTH_CLASSES, _CLASS_COLORS, strict=True):
            _plot_over_versions(right, run, f"speculation/acceptance_length_{found}", trained, color=color, label=found)
        if not left.lines and not right.lines:
            return None
        left.set_ylabel("share of drafts accepted")
        left.set_ylim(0, 1)
        right.set_ylabel("tokens per decode step")
        for axes in (left, right):
            steps_axis(axes)
            if trained:
                axes.set_xlabel("drafter version (optimizer steps)")
            legend(axes)
        return to_svg(figure, "drafts")


def _plot_over_versions(axes: Axes, run: RunData, name: str, trained: bool, color: str, label: str) -> None:
    steps, values = run.series(name)
    versions = dict(zip(*run.series("speculation/drafter_version"), strict=True)) if trained else {s: s for s in steps}
    shown = [(versions[step], value) for step, value in zip(steps, values, strict=True) if step in versions]
    if shown:
        axes.plot(*zip(*shown, strict=True), marker=".", color=color, label=label)


def plot_history(run: RunData) -> str | None:
    """The suffix trees' history over steps: responses in memory, and the acceptance of drafts from them."""
    steps, held = run.series("speculation/suffix_mib")
    if not steps:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure()
        above, below = figure.subplots(2, 1, sharex=True)
        above.fill_between(steps, held, color=GREEN, alpha=0.35, lw=0)
        above.set_ylabel("history (MiB)")
        above.set_ylim(bottom=0)
        below.plot(*run.series("speculation/acceptance_length_suffix"), color=BLUE, marker=".")
        below.axhline(1.0, color=INK["muted"], lw=1.0, ls=":")
        below.set_ylabel("tokens per draft\nand verification")
        steps_axis(below)
        return to_svg(figure, "history")


def plot_strategies(stretches: Sequence[Stretch]) -> str | None:
    """One rollout: the running batch over time with the active strategy, and tokens per request and step."""
    if not stretches:
        return None
    names = sorted({stretch.strategy for stretch in stretches}, key=lambda name: (name != "off", name))
    # the first colour is that of "off"
    speculating = itertools.cycle(STRATEGY_COLORS[1:])
    colors = {name: STRATEGY_COLORS[0] if name == "off" else next(speculating) for name in names}
    with matplotlib.rc_context(STYLE):
        figure = new_figure(height=3.6, width=13.0)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.7, 1.0])
        for name in names:
            spans = [(one.start, one.duration) for one in stretches if one.strategy == name]
            top = max(one.batch for one in stretches) * 1.05
            above.broken_barh(spans, (0, top), facecolor=colors[name], alpha=0.35, lw=0, label=name)
        edges = [stretches[0].start, *(one.start + one.duration for one in stretches)]
        above.stairs([one.batch for one in stretches], edges, color=INK["text"], lw=1.4, baseline=None)
        above.set_ylabel("running requests")
        above.set_ylim(bottom=0)
        below.stairs([one.tokens_per_request for one in stretches], edges, color=BLUE, lw=1.2, baseline=None)
        below.axhline(1.0, color=INK["muted"], lw=1.0, ls=":")
        below.set_ylabel("tokens per\nrequest, step")
        below.set_xlabel("seconds since the first engine step")
        above.margins(x=0.005)
        legend(above, 10)
        return to_svg(figure, "strategies")
