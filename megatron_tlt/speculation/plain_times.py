"""Seconds of an engine step by batch, from steps that were measured; and when to measure one without drafts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

_NEAR = 1.0
"""Doublings of the batch within which a measured batch speaks for another."""
_BETWEEN = 3.0
"""Doublings from one measured batch to the next between which others are interpolated."""
SETTLING = 2
"""Steps without drafts in a row that are not measured: after drafts a step takes longer, as caches hold other data
(measured on the quickstart model: 1.12, 1.05, 1.01 of a step in a rollout without drafts)."""
_FIRST_HOLD = SETTLING + 2
"""Steps in a row at a batch that was never measured: one that still verifies drafts, settling ones, a measured one."""
OUTLIER = 3.0
"""Times the median above which a step is left out: garbage collection, or another process."""


def cell_of(batch: int) -> int:
    """Cells of batches, two for each doubling: 1; 2; 3; 4; 5, 6; 7 to 9; 10 to 13; ..."""
    return round(2 * math.log2(batch))


class StepSeconds:
    """Mean seconds of an engine step of one kind, by batch.

    Steps of like batches share a cell, which keeps the latest ``per_cell``. Between cells seconds are linear in the
    batch, and never fall with it (pool adjacent violators): a cell of a few steps is noisy. Beyond the outermost cells
    the slope goes on.

    A step also takes longer the longer its requests' contexts are. That is averaged over the steps measured.
    """

    def __init__(self, per_cell: int = 64) -> None:
        self._per_cell = per_cell
        self._cells: dict[int, list[tuple[int, float]]] = {}
        self._curve: list[tuple[float, float]] | None = None

    def __len__(self) -> int:
        """Steps that are kept."""
        return sum(map(len, self._cells.values()))

    def observe(self, batch: int, seconds: float) -> None:
        """Take in a step of ``batch`` requests (at least 1) that took so long."""
        steps = self._cells.setdefault(cell_of(batch), [])
        steps.append((batch, seconds))
        del steps[: -self._per_cell]
        self._curve = None

    def covers(self, batch: int) -> bool:
        """Whether a batch within a factor of two was measured, or one on either side within a factor of eight."""
        away = [math.log2(at / batch) for at, _ in self._points()]
        above = min((one for one in away if one >= 0), default=math.inf)
        below = min((-one for one in away if one <= 0), default=math.inf)
        return min(above, below) <= _NEAR or above + below <= _BETWEEN

    def seconds(self, batch: int) -> float:
        """Of a step of ``batch`` requests.

        Raises:
            ValueError: nothing was measured.
        """
        points = self._points()
        if not points:
            raise ValueError("no step was measured")
        above = next((i for i, (at, _) in enumerate(points) if at >= batch), len(points) - 1)
        low, high = max(0, above - 1), max(above, min(1, len(points) - 1))
        (x0, y0), (x1, y1) = points[low], points[high]
        if x0 == x1:
            return y0
        # a step takes time also for no request at all
        return max(y0 + (y1 - y0) * (batch - x0) / (x1 - x0), 0.5 * points[0][1])

    def _points(self) -> list[tuple[float, float]]:
        """(mean batch, seconds) of the cells, in order."""
        if self._curve is None:
            groups: list[tuple[float, float, int]] = []
            for _, steps in sorted(self._cells.items()):
                most = OUTLIER * statistics.median(seconds for _, seconds in steps)
                kept = [(batch, seconds) for batch, seconds in steps if seconds <= most]
                batches, times = zip(*kept, strict=True)
                groups.append((statistics.fmean(batches), statistics.fmean(times), len(kept)))
            self._curve = [(batch, seconds) for (batch, _, _), seconds in zip(groups, _rising(groups), strict=True)]
        return self._curve

    def state(self) -> list[list[Any]]:
        """As JSON."""
        return [[batch, seconds] for steps in self._cells.values() for batch, seconds in steps]

    def load_state(self, state: list[list[Any]]) -> None:
        """Go on from ``state()``'s result."""
        self._cells.clear()
        self._curve = None
        for batch, seconds in state:
            self.observe(int(batch), float(seconds))


def _rising(groups: list[tuple[float, float, int]]) -> list[float]:
    """The second numbers with as little change as makes them rise, weighted by the third: least squares."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, how many groups
    for _, value, weight in groups:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, weight_a, count_a), (b, weight_b, count_b) = pools[-2:]
            weight = weight_a + weight_b
            pools[-2:] = [((a * weight_a + b * weight_b) / weight, weight, count_a + count_b)]
    return [mean for mean, _, count in pools for _ in range(count)]


class PlainStepProbe:
    """Says when an engine that speculates should do a few steps without drafts, to know how long these take.

    At most ``share`` of the engine steps so far are spent on that, ``hold`` in a row, as the first one after a change
    still verifies drafts and ``SETTLING`` more do not count; fewer at a batch that was never measured. Batches at which
    rollouts spend most steps come first, then those of fewer. A batch with ``enough`` measured steps is measured ten
    times more seldom.

    It counts and knows no time: the same rollouts are probed alike, also after a resume.
    """

    def __init__(self, share: float = 0.01, hold: int = 8, enough: int = 24) -> None:
        self._share, self._hold, self._enough = share, hold, enough
        self._credit = 0.0
        self._left = 0
        self._steps: Counter[int] = Counter()
        self._measured: Counter[int] = Counter()

    def begin_rollout(self) -> None:
        """A new rollout begins."""
        self._left = 0

    def next(self, batch: int) -> bool:
        """Whether the step to come, which would speculate, should not; ``batch`` counts its requests (at least 1)."""
        cell = cell_of(batch)
        self._steps[cell] += 1
        self._credit += self._share
        if self._left:
            self._left -= 1
            return True
        hold = self._hold if self._measured[cell] else _FIRST_HOLD
        if self._credit < hold or not 0 < self._need(cell) >= max(map(self._need, self._steps)):
            return False
        self._credit -= hold
        self._left = hold - 1
        return True

    def _need(self, cell: int) -> float:
        """Which batch comes first; 0 where enough is measured. Measured steps grow with the root of all steps."""
        steps, measured = self._steps[cell], self._measured[cell]
        rare = measured >= self._enough and steps * self._share < 10 * measured
        return 0.0 if rare else steps / (1 + measured) ** 2

    def measured(self, batch: int) -> None:
        """A step without drafts was measured, for whatever reason there was none."""
        self._measured[cell_of(batch)] += 1

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "credit": self._credit,
            "steps": sorted(self._steps.items()),
            "measured": sorted(self._measured.items()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result."""
        self._credit, self._left = float(state["credit"]), 0
        self._steps = Counter({int(cell): int(count) for cell, count in state["steps"]})
        self._measured = Counter({int(cell): int(count) for cell, count in state["measured"]})
