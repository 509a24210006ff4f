"""Draw one step of a run from its timeline: the ranks' wait for the longest responses, and what trains in it.

python tools/step_picture.py RUN --step 12 --out docs/images/step.svg
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from megatron_tlt.errors import ConfigError, TltError
from megatron_tlt.observe.report_data import Bar, last_step_timeline
from megatron_tlt.observe.report_style import PHASE_COLORS, STYLE
from megatron_tlt.observe.timeline import TRACE_FILE, read_trace
from megatron_tlt.platform.files import atomic_write_text

NAMES = {
    "rollout": "rollout",
    "idle": "waits for the longest responses",
    "drafter": "drafter trains",
    "log_probs": "log-probs",
    "update": "policy update",
    "reshard": "weights to the engines",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--step", type=int, help="the step to draw (default: the newest)")
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    given = parser.parse_args(arguments)
    try:
        draw(bars_of(given.run, given.step), given.out)
    except TltError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def bars_of(run: Path, step: int | None) -> list[Bar]:
    """The spans of a step; raises ConfigError if the run has no timeline of it."""
    trace: dict[str, Any] = read_trace(run / TRACE_FILE)
    if step is not None:
        kept = [e for e in trace["traceEvents"] if e.get("ph") == "M" or e.get("args", {}).get("step") == step]
        trace = {"traceEvents": kept}
    timeline = last_step_timeline(trace)
    if timeline is None or (step is not None and timeline.step != step):
        raise ConfigError(f"{run / TRACE_FILE}: no spans of step {step}; allowed: a step that the timeline still has")
    return timeline.bars


def draw(bars: list[Bar], out: Path) -> None:
    """Two panels of the same step: phases alone, and with the drafter's training in the wait."""
    ranks = sorted({bar.row.partition(" · ")[0] for bar in bars})
    with mpl.rc_context({**STYLE, "svg.hashsalt": "step", "figure.facecolor": "white"}):
        figure, panels = plt.subplots(2, 1, sharex=True, figsize=(9, 1.1 + 0.62 * len(ranks)), layout="constrained")
        drawn: dict[str, Any] = {}
        for axes, title, phases in (
            (panels[0], "ranks that wait", NAMES.keys() - {"drafter"}),
            (panels[1], "the same wait, put to work", NAMES.keys()),
        ):
            for bar in sorted(bars, key=lambda bar: bar.category == "drafter"):
                if bar.category in phases:
                    row = ranks.index(bar.row.partition(" · ")[0])
                    span = [(bar.start, bar.duration)]
                    drawn[bar.category] = axes.broken_barh(span, (row - 0.38, 0.76), color=PHASE_COLORS[bar.category])
            axes.set_title(title, loc="left")
            axes.set_yticks(range(len(ranks)), ranks)
            axes.set_ylim(len(ranks) - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
            axes.margins(x=0.005)
        panels[1].set_xlabel("seconds since the start of the step")
        order = [name for name in NAMES if name in drawn]
        figure.legend(
            [drawn[name] for name in order], [NAMES[name] for name in order], loc="outside lower center", ncols=6
        )
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(out, buffer.getvalue())


if __name__ == "__main__":
    sys.exit(main())
