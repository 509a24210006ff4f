"""The common output format of benchmarks, and timing of their cases on a noisy machine."""

from __future__ import annotations

import json
import math
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions
from rich.table import Table

from megatron_tlt.observe.jsonl import finite
from megatron_tlt.platform.files import atomic_write_text

T = TypeVar("T")

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
}

_CASE_WIDTH = 24


@dataclass
class BenchmarkResult:
    """Measurements of a benchmark, their environment, and the targets they meet.

    ``rows`` are flat dictionaries, one per case; ``targets`` maps a name to value, target, op and met.
    """

    environment: dict[str, Any]
    name: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)

    def target(self, name: str, value: float, op: str, target: float) -> bool:
        """Records whether ``value op target`` holds and returns it; NaN meets no target.

        Raises:
            ValueError: ``op`` is not one of OPERATORS, or ``name`` exists already.
        """
        if op not in OPERATORS:
            raise ValueError(f"op {op!r}: allowed are {', '.join(OPERATORS)}")
        if name in self.targets:
            raise ValueError(f"target {name!r} exists already")
        met = not math.isnan(value) and OPERATORS[op](value, target)
        self.targets[name] = {"value": value, "target": target, "op": op, "met": bool(met)}
        return bool(met)

    def incomplete(self, name: str) -> None:
        """Records that a target's measurement is missing: running the benchmark again adds it."""
        self.targets[name] = {"value": math.nan, "target": math.nan, "op": "incomplete", "met": False}

    @property
    def all_met(self) -> bool:
        """Whether every target is met (True without targets)."""
        return all(entry["met"] for entry in self.targets.values())

    def to_dict(self) -> dict[str, Any]:
        """The plain data that is written."""
        return {"name": self.name, "environment": self.environment, "rows": self.rows, "targets": self.targets}

    def write(self, path: Path | str) -> None:
        """Writes JSON atomically; NaN and infinities become null.

        Raises:
            RunError: the disk is full.
        """
        atomic_write_text(path, json.dumps(finite(self.to_dict()), indent=2, allow_nan=False) + "\n")

    def _is_raw(self, column: str) -> bool:
        values = [row.get(column) for row in self.rows]
        return any(isinstance(v, list) or (isinstance(v, dict) and any(map(_is_list, v.values()))) for v in values)

    def print(self, console: Console | None = None) -> None:
        """Prints the rows and the targets as tables."""
        console = console or Console()
        # single measurements are in the JSON; the table shows their summary
        columns = [c for c in dict.fromkeys(key for row in self.rows for key in row) if not self._is_raw(c)]
        if len(self.rows) > 2:
            shared = [c for c in columns if len({_text(row.get(c)) for row in self.rows}) == 1]
            columns = [column for column in columns if column not in shared]
            if shared:
                console.print(", ".join(f"{c.replace('_', ' ')}: {_text(self.rows[0].get(c))}" for c in shared))
        if columns:
            for table in _tables(self.name, columns, self.rows, console):
                console.print(table)
        if self.targets:
            table = Table(title="targets")
            for column in ("target", "measured", "wanted", "met"):
                table.add_column(column)
            for name, entry in self.targets.items():
                met = "[green]yes[/green]" if entry["met"] else "[red]no[/red]"
                table.add_row(name, _text(entry["value"]), f"{entry['op']} {_text(entry['target'])}", met)
            console.print(table)


def _tables(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], console: Console) -> list[Table]:
    """A table with one row per case; if it is too wide, tables with one column per case, as many as fit."""
    table = Table(title=name or None)
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    if console.measure(table, options=_boundless(console)).minimum <= console.width:
        return [table]
    tables: list[Table] = []
    while rows:
        title = "" if tables else name
        count = 1
        while count < len(rows) and _fits(_lying(title, columns, rows[: count + 1]), console):
            count += 1
        tables.append(_lying(title, columns, rows[:count]))
        rows = rows[count:]
    return tables


def _lying(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """A transposed table: one column per case, headed by its first value; rows without any value are left out."""
    first, *others = columns
    table = Table(first.replace("_", " "), title=name or None)
    for row in rows:
        table.add_column(_text(row.get(first)), max_width=_CASE_WIDTH, overflow="fold")
    for column in others:
        if any(row.get(column) is not None for row in rows):
            table.add_row(column.replace("_", " "), *(_text(row.get(column)) for row in rows))
    return table


def _fits(table: Table, console: Console) -> bool:
    return console.measure(table, options=_boundless(console)).maximum <= console.width


def _boundless(console: Console) -> ConsoleOptions:
    return console.options.update(width=1 << 16)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, dict):
        if set(value) == {"ratio", "low", "high"}:
            return f"{value['ratio']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
        return ", ".join(f"{key} {_text(entry)}" for key, entry in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def interleave(cases: Mapping[str, Callable[[], T]], repeats: int, warmups: int = 0) -> dict[str, list[float]]:
    """Times each case ``repeats`` times, in seconds, in rounds of all cases.

    With interleaving, a slow period of the machine affects all cases equally. Each round starts with the next case, so
    that no case always runs first. The ``warmups`` rounds before are not counted. Entry i of every list is from round
    i.

    Raises:
        ValueError: ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}, must be at least 1")
    names = list(cases)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmups, repeats):
        shift = turn % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            cases[name]()
            elapsed = time.perf_counter() - start
            if turn >= 0:
                times[name].append(elapsed)
    return times


def ratio_of_medians(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """median(a) / median(b), with the smallest and largest ratio of a pair (a[i], b[i]) as its spread.

    ``low <= ratio <= high`` always holds: the spread is widened if the medians' ratio is outside the pairs'.

    Raises:
        ValueError: the lists are empty, differ in length, or contain a number that is not positive and finite.
    """
    pairs = _ratios(a, b)
    ratio = statistics.median(a) / statistics.median(b)
    return {"ratio": ratio, "low": min([ratio, *pairs]), "high": max([ratio, *pairs])}


def median_of_ratios(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """The median of a[i] / b[i], with the smallest and largest: for pairs with different work.

    Raises:
        ValueError: see ``ratio_of_medians``.
    """
    pairs = _ratios(a, b)
    return {"ratio": statistics.median(pairs), "low": min(pairs), "high": max(pairs)}


def _ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} measurements: must be equally many, at least 1")
    if not all(math.isfinite(x) and x > 0 for x in (*a, *b)):
        raise ValueError("a measurement is not positive and finite")
    return [x / y for x, y in zip(a, b, strict=True)]
