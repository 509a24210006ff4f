"""Causes that hold for several RL steps in a row, each named once until it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

Row = Mapping[str, float | None]
"""Metrics of a step by name."""

STEPS = 5
"""Steps in a row before a warning."""


class LastingCauses:
    """Counts how long each cause has held; one that reaches ``steps`` is new once, and again only after it ended."""

    def __init__(self, steps: int = STEPS) -> None:
        self.steps = steps
        self._lasted: Counter[str] = Counter()
        self._warned: set[str] = set()
        self.warnings = 0
        """Causes that were new so far."""

    @property
    def active(self) -> int:
        """Causes that were new once and hold still."""
        return len(self._warned)

    def add(self, holding: Sequence[str], unknown: Collection[str] = ()) -> list[str]:
        """Take in a step in which these causes hold; those that are new now, in the order of ``holding``.

        Causes that are ``unknown`` in this step neither go on nor end.
        """
        kept = {*holding, *unknown}
        self._lasted = Counter({name: self._lasted[name] + (name in holding) for name in kept})
        self._warned &= kept
        new = [name for name in holding if self._lasted[name] >= self.steps and name not in self._warned]
        self._warned.update(new)
        self.warnings += len(new)
        return new


class StepsCheck:
    """Follows a run by its steps' metrics; a cause that holds for ``steps`` in a row is a warning, until it ends."""

    def __init__(self, steps: int = STEPS) -> None:
        self._causes = LastingCauses(steps)

    @property
    def warnings(self) -> int:
        """Warnings given so far."""
        return self._causes.warnings

    @property
    def active(self) -> int:
        """Causes that were warned of and hold still."""
        return self._causes.active

    def add(self, row: Row) -> list[str]:
        """The new warnings after a step with these metrics; metrics that are absent give none."""
        raise NotImplementedError

    def of_run(self, rows: Iterable[Row]) -> list[str]:
        """The warnings of a whole run's rows, each with its step; evaluations before the first step are skipped."""
        return [f"Step {row['step']}: {text}." for row in rows if row.get("step") for text in self.add(row)]
