"""Causes that hold for several RL steps in a row; each is reported once until it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, float | None]
"""Metrics of a step by name."""

STEPS = 5
"""Steps in a row before a warning."""


def value_of(row: Row, name: str, default: float | None = None) -> Any:
    """A metric, or ``default`` if the row lacks it: not measured, or written by an earlier release."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else default


class StepsCheck:
    """Follows a run by its steps' metrics; warns once about a cause that holds for ``steps`` steps in a row."""

    def __init__(self, steps: int = STEPS) -> None:
        self.steps = steps
        self._lasted: Counter[str] = Counter()
        self._warned: set[str] = set()
        self.warnings = 0
        """Number of causes reported as new."""

    @property
    def active(self) -> int:
        """Number of reported causes that still hold."""
        return len(self._warned)

    def count(self, holding: Sequence[str], unknown: Collection[str] = ()) -> list[str]:
        """Adds a step in which the causes ``holding`` hold; returns those that are to be reported, in that order.

        Causes that are ``unknown`` in this step keep their count.
        """
        kept = {*holding, *unknown}
        self._lasted = Counter({name: self._lasted[name] + (name in holding) for name in kept})
        self._warned &= kept
        new = [name for name in holding if self._lasted[name] >= self.steps and name not in self._warned]
        self._warned.update(new)
        self.warnings += len(new)
        return new

    def add(self, row: Row) -> list[str]:
        """Returns the new warnings after a step with these metrics; absent metrics cause none."""
        raise NotImplementedError

    def of_run(self, rows: Iterable[Row]) -> list[str]:
        """The warnings for all rows of a run, each with its step; evaluations before the first step are skipped."""
        return [f"Step {row['step']}: {text}." for row in rows if row.get("step") for text in self.add(row)]
