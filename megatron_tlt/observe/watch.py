"""A run as a page for the terminal, from the files in its folder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_tlt.observe.drafter_check import DrafterCheck
from megatron_tlt.observe.learning_check import LearningCheck
from megatron_tlt.observe.report_data import RunData, Stretch, is_number, last_rollout, load_run, section
from megatron_tlt.observe.timeline import PHASES, TRACE_FILE, read_trace

_BARS = "▁▂▃▄▅▆▇█"
_POINTS, _WIDTH = 40, 74
_FIGURES = {
    "reward/mean": ("reward", "{:.3f}"),
    "eval/pass_at_1": ("held-out pass@1", "{:.3f}"),
    "length/median": ("length, median", "{:.0f}"),
    "length/max": ("length, longest", "{:.0f}"),
    "speculation/acceptance_length": ("acceptance length", "{:.2f}"),
    "speculation/gain": ("gain from speculation", "{:.2f}"),
    "spot/share": ("share of the wait used", "{:.2f}"),
    "rollout/tokens_per_s": ("generated tokens/s", "{:,.0f}"),
    "time/total": ("step (s)", "{:.1f}"),
}
_COLORS = ("blue", "green", "magenta", "cyan", "yellow", "red", "white")


class RunPage:
    """Reads a run's folder again for each page; the timeline, which is large, only when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trace: tuple[int, list[Stretch]] = (0, [])

    def render(self) -> Panel:
        """The page; raises RunError if the folder does not exist."""
        run = load_run(self._folder, traced=False)
        parts: list[Any] = [_headline(run)]
        if run.metrics:
            parts += [_figures(run), Text(), _phases(run.metrics[-1])]
        if stretches := self._stretches():
            parts += [Text(), _strategies(stretches)]
        alarms = LearningCheck().of_run(run.metrics) + DrafterCheck().of_run(run.metrics)
        parts += [Text(f"! {alarm}", style="yellow") for alarm in alarms]
        return Panel(Group(*parts), title=f"run {run.name}", width=100)

    def _stretches(self) -> list[Stretch]:
        path = self._folder / TRACE_FILE
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        if changed != self._trace[0]:
            try:
                self._trace = (changed, last_rollout(read_trace(path)))
            except (OSError, ValueError):  # being written; the next page has it
                return self._trace[1]
        return self._trace[1]


def _headline(run: RunData) -> Text:
    steps, total = (run.metrics[-1]["step"] if run.metrics else 0), section(run.config, "trainer", "steps")
    line = f"step {steps:.0f}" + (f" of {total}" if is_number(total) else "")
    written: Any = run.metrics[-1].get("wall_time") if run.metrics else None
    if is_number(written):
        line += f", written {_ago(time.time() - written)} ago"
    seconds = run.series("time/total")[1]
    if seconds and is_number(total) and total > steps:
        recent = sorted(seconds[-20:])[len(seconds[-20:]) // 2]
        line += f", about {_ago(recent * (total - steps))} to go"
    return Text(line)


def _figures(run: RunData) -> Table:
    table = Table("", "newest", "mean of 10", "over the steps", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, (title, form) in _FIGURES.items():
        values = run.series(name)[1]
        if values:
            mean = sum(values[-10:]) / len(values[-10:])
            table.add_row(title, form.format(values[-1]), form.format(mean), sparkline(values))
    return table


def _phases(row: dict[str, Any]) -> Text:
    """The newest step's phases as a bar."""
    times = {name: float(row[f"time/{name}"]) for name in PHASES if row.get(f"time/{name}")}
    times["rollout"] = max(0.0, times.get("rollout", 0.0) - times.get("idle", 0.0))
    whole, bar, named = sum(times.values()) or 1.0, Text(), Text()
    for color, (name, seconds) in zip(_COLORS * 2, times.items(), strict=False):
        bar.append("█" * round(_WIDTH * seconds / whole), style=color)
        named.append(f"{name.replace('_', '-')} {seconds:.1f} s  ", style=color)
    return Text("\n").join([bar, named])


def _strategies(stretches: Sequence[Stretch]) -> Table:
    """The newest rollout: strategies in their order, with the batches that they decoded."""
    table = Table(
        "strategy",
        "batch",
        "seconds",
        "ms a step",
        "tokens a request",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for first, last, part in _joined(stretches)[-12:]:
        seconds = sum(each.duration for each in part)
        steps = sum(each.duration / each.ms_per_step for each in part if each.ms_per_step)
        tokens = sum(each.tokens_per_request * each.duration for each in part) / (seconds or 1.0)
        batch = f"{first}" if first == last else f"{first} to {last}"
        table.add_row(part[0].strategy, batch, f"{seconds:.2f}", f"{seconds / (steps or 1.0):.1f}", f"{tokens:.2f}")
    return table


def _joined(stretches: Sequence[Stretch]) -> list[tuple[int, int, list[Stretch]]]:
    """Consecutive stretches of one strategy, with their first and last batch."""
    found: list[list[Stretch]] = []
    for each in stretches:
        if not found or found[-1][-1].strategy != each.strategy:
            found.append([])
        found[-1].append(each)
    return [(part[0].batch, part[-1].batch, part) for part in found]


def sparkline(values: Sequence[float]) -> str:
    """The values as a line of bars, averaged into at most 40 points."""
    count = min(_POINTS, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(points), max(points)
    if high == low:
        return _BARS[0] * count
    return "".join(_BARS[round((point - low) / (high - low) * (len(_BARS) - 1))] for point in points)


def _ago(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
