"""Style of the report's plots: colours as CSS variables that follow the theme, and inline SVG."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from typing import Any, TypeVar

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_tlt.observe.report_data import RunData

Data = TypeVar("Data")

# Colours used in matplotlib; each stands for the CSS variable of its name in the report.
INK = {"text": "#101112", "muted": "#202122", "grid": "#303132", "card": "#404142"}
PHASE_COLORS = {
    "rollout": "#3b7dd8",
    "idle": "#b4bbc6",
    "reward": "#8e5bd0",
    "log_probs": "#e8923a",
    "update": "#2f9e62",
    "reshard": "#d64550",
    "evaluate": "#1b9aaa",
    "checkpoint": "#8a6a4f",
    "drafter": "#d84f9a",
    "other": "#7f8896",
}
CSS_NAMES = {color: f"--{name}" for name, color in INK.items()} | {
    color: f"--phase-{name.replace('_', '-')}" for name, color in PHASE_COLORS.items()
}
BLUE, ORANGE, GREEN, RED = (PHASE_COLORS[name] for name in ("rollout", "log_probs", "update", "reshard"))
CURVE_COLORS = tuple(
    PHASE_COLORS[name]
    for name in ("rollout", "log_probs", "update", "reshard", "reward", "evaluate", "drafter", "checkpoint", "other")
)
"""The colours of curves that are compared in one plot."""
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK["grid"],
    "axes.labelcolor": INK["muted"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK["grid"],
    "grid.linewidth": 0.6,
    "text.color": INK["text"],
    "xtick.color": INK["grid"],
    "ytick.color": INK["grid"],
    "xtick.labelcolor": INK["muted"],
    "ytick.labelcolor": INK["muted"],
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
}
STANDALONE: dict[str, Any] = {**STYLE, "grid.color": "#dde0e4"}
"""Style of a plot in its own file, where no page defines the colours."""


def to_svg(figure: Figure, name: str) -> str:
    """Inline SVG of ``figure``; ``name`` makes ids unique among the plots of a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    # Only salted ids (clip paths, markers, hatches) are referenced; ids such as patch_1 would collide on the page.
    text = re.sub(r' id="(?![a-z][0-9a-f]{10}")[^"]*"', "", text)
    for color, variable in CSS_NAMES.items():
        text = text.replace(color, f"var({variable})")
    return text.strip()


def new_figure(height: float = 2.7, width: float = 6.4) -> Figure:
    """An empty figure; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def plotted(
    name: str, height: float = 2.7, width: float = 6.4
) -> Callable[[Callable[[Figure, Data], None]], Callable[[Data], str | None]]:
    """Turns a function that draws data on a figure into one that returns its SVG, or None if it drew nothing."""

    def wrap(draw: Callable[[Figure, Data], None]) -> Callable[[Data], str | None]:
        @functools.wraps(draw)
        def plot(data: Data) -> str | None:
            with matplotlib.rc_context(STYLE):
                figure = new_figure(height, width)
                draw(figure, data)
                return to_svg(figure, name) if any(axes.has_data() for axes in figure.axes) else None

        return plot

    return wrap


def draw_series(axes: Any, run: RunData, metric: str, **style: Any) -> None:
    """A metric over steps, if the run has it."""
    steps, values = run.series(metric)
    if steps:
        axes.plot(steps, values, **style)


def no_speculation(axes: Any, label: str | None = None) -> None:
    """A line at 1."""
    axes.axhline(1.0, color=INK["muted"], lw=1.0, ls=":", label=label)


def steps_axis(axes: Any) -> None:
    """Integer steps on the x axis."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.margins(x=0.02)


def legend(axes: Any, columns: int = 4) -> None:
    """A legend above the plot."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, handlelength=1.4, borderaxespad=0.2)


def plain_log(axes: Any) -> None:
    """A logarithmic axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
