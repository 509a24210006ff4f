"""Plots of a simulation: running requests per engine, phases per policy, speed-up over nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from megatron_tlt.observe.report_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PHASE_COLORS,
    RED,
    STANDALONE,
    legend,
    new_figure,
)
from megatron_tlt.planning.simulation.steps import PHASES, Outcome, speedup

_COLORS = (BLUE, ORANGE, GREEN, RED, PHASE_COLORS["reward"], PHASE_COLORS["drafter"])


def plot(by_nodes: Mapping[int, Mapping[str, Outcome]], path: Path, title: str) -> None:
    """Writes the figure in the format of the file's extension; raises ValueError if matplotlib does not support it.

    Timelines and phases are those of the most nodes in ``by_nodes``, outcomes by number of nodes and policy.
    """
    outcomes = by_nodes[max(by_nodes)]
    watched = {name: outcome for name, outcome in outcomes.items() if outcome.running}
    with matplotlib.rc_context(STANDALONE):
        figure = new_figure(2.6 * (2 + len(watched)) / 2 + 1.2, 11.0)
        grid = figure.add_gridspec(len(watched) + 2, 2)
        _phases(figure.add_subplot(grid[:2, 0]), outcomes)
        _speedups(figure.add_subplot(grid[:2, 1]), by_nodes)
        _timelines(figure, grid, watched)
        figure.suptitle(title, color=INK["text"], fontsize=10)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def _phases(axes: Any, outcomes: Mapping[str, Outcome]) -> None:
    names = list(outcomes)
    bottom = [0.0] * len(names)
    parts = {
        "rollout": [o.phase("rollout") * (1.0 - o.mean("idle")) for o in outcomes.values()],
        "idle": [o.phase("rollout") * o.mean("idle") for o in outcomes.values()],
        **{phase: [o.phase(phase) for o in outcomes.values()] for phase in PHASES if phase != "rollout"},
    }
    for phase, values in parts.items():
        if any(values):
            axes.bar(names, values, 0.7, bottom=bottom, color=PHASE_COLORS[phase], label=phase.replace("_", "-"))
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.set_ylabel("seconds per step")
    axes.grid(axis="x", visible=False)
    legend(axes, 6)


def _speedups(axes: Any, by_nodes: Mapping[int, Mapping[str, Outcome]]) -> None:
    nodes = sorted(by_nodes)
    for color, name in zip(_COLORS, by_nodes[nodes[0]], strict=False):
        if name == "off" or "off" not in by_nodes[nodes[0]]:
            continue
        found = [speedup(by_nodes[count], name) for count in nodes]
        ratios = [entry["ratio"] for entry in found]
        error = [[e["ratio"] - e["low"] for e in found], [e["high"] - e["ratio"] for e in found]]
        axes.errorbar(nodes, ratios, yerr=error, color=color, marker="o", ms=4, capsize=2, label=name)
    axes.axhline(1.0, color=INK["text"], lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_xlabel("nodes")
    axes.set_ylabel("speed-up over off")
    axes.set_ylim(bottom=0)
    legend(axes, 3)


def _timelines(figure: Figure, grid: Any, watched: Mapping[str, Outcome]) -> None:
    end = max((outcome.running[0][-1][0] for outcome in watched.values()), default=1.0)
    for row, (name, outcome) in enumerate(watched.items()):
        axes = figure.add_subplot(grid[row + 2, :])
        for index, points in enumerate(outcome.running):
            axes.plot(*zip(*points, strict=True), drawstyle="steps-post", lw=1.0, color=_COLORS[index % len(_COLORS)])
        axes.set_xlim(0, end)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{name}\nrunning", fontsize=8)
        axes.tick_params(labelbottom=row == len(watched) - 1)
        if row == len(watched) - 1:
            axes.set_xlabel("seconds of one rollout; a line per engine, at most eight")
