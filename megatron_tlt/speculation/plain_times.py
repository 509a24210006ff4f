"""Estimates the time of an engine step without drafts by batch size, and schedules steps that measure it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

_NEAR = 1.0
"""Doublings of the batch size within which a measured batch represents another."""
_BETWEEN = 3.0
"""Maximum doublings between two measured batches to interpolate between them."""
SETTLING = 2
"""Consecutive steps without drafts that are ignored: after drafts a step takes longer, as caches hold other data
(measured on the quickstart model: 1.12, 1.05, 1.01 of a step in a rollout without drafts)."""
_FIRST_HOLD = SETTLING + 2
"""Consecutive steps at an unmeasured batch: one that still verifies drafts, settling ones, a measured one."""
OUTLIER = 3.0
"""Multiple of the median above which a step is ignored: garbage collection, or another process."""


def cell_of(batch: int) -> int:
    """Cell index of a batch size, two cells per doubling: 1; 2; 3; 4; 5, 6; 7 to 9; 10 to 13; ..."""
    return round(2 * math.log2(batch))


class StepSeconds:
    """Mean seconds of one kind of engine step, by batch size.

    Steps of similar batches share a cell, which keeps the latest ``per_cell``. Between cells the estimate is linear in
    the batch. It never decreases with it (pool adjacent violators), because a cell with few steps is noisy. Outside the
    measured range the outermost slope continues.

    A step also takes longer with longer contexts; this effect is averaged over the measured steps.
    """

    def __init__(self, per_cell: int = 64) -> None:
        self._per_cell = per_cell
        self._cells: dict[int, list[tuple[int, float]]] = {}
        self._curve: list[tuple[float, float]] | None = None

    def __len__(self) -> int:
        """Number of stored steps."""
        return sum(map(len, self._cells.values()))

    def observe(self, batch: int, seconds: float) -> None:
        """Record a step of ``batch`` requests (at least 1)."""
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
        """Estimated seconds of a step with ``batch`` requests.

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
        # a step takes time even without requests
        return max(y0 + (y1 - y0) * (batch - x0) / (x1 - x0), 0.5 * points[0][1])

    def _points(self) -> list[tuple[float, float]]:
        """(mean batch, seconds) of each cell, in order."""
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
        """The state as JSON."""
        return [[batch, seconds] for steps in self._cells.values() for batch, seconds in steps]

    def load_state(self, state: list[list[Any]]) -> None:
        """Restore the result of ``state()``."""
        self._cells.clear()
        self._curve = None
        for batch, seconds in state:
            self.observe(int(batch), float(seconds))


def _rising(groups: list[tuple[float, float, int]]) -> list[float]:
    """Closest non-decreasing fit to the second numbers, in least squares weighted by the third (isotonic fit)."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, number of groups
    for _, value, weight in groups:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, weight_a, count_a), (b, weight_b, count_b) = pools[-2:]
            weight = weight_a + weight_b
            pools[-2:] = [((a * weight_a + b * weight_b) / weight, weight, count_a + count_b)]
    return [mean for mean, _, count in pools for _ in range(count)]


class PlainStepProbe:
    """Decides when a speculating engine runs a few steps without drafts, to measure their duration.

    At most ``share`` of the engine steps are such probes. They come in runs of ``hold``, because the first one still
    verifies drafts and ``SETTLING`` more do not count; runs at an unmeasured batch are shorter. Batches with most
    rollout steps are probed first. A batch with ``enough`` measured steps is probed a tenth as often.

    It counts steps and ignores time, so the same rollouts are probed at the same steps, also after a resume.
    """

    def __init__(self, share: float = 0.01, hold: int = 8, enough: int = 24) -> None:
        self._share, self._hold, self._enough = share, hold, enough
        self._credit = 0.0
        self._left = 0
        self._steps: Counter[int] = Counter()
        self._measured: Counter[int] = Counter()

    def begin_rollout(self) -> None:
        """Prepare for a new rollout."""
        self._left = 0

    def next(self, batch: int) -> bool:
        """Whether the next step should run without drafts although it would speculate; ``batch`` is at least 1."""
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
        """Priority of a batch; 0 if enough is measured. Measured steps grow with the square root of all steps."""
        steps, measured = self._steps[cell], self._measured[cell]
        rare = measured >= self._enough and steps * self._share < 10 * measured
        return 0.0 if rare else steps / (1 + measured) ** 2

    def measured(self, batch: int) -> None:
        """Count a measured step without drafts, whatever the reason for it."""
        self._measured[cell_of(batch)] += 1

    def state(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "credit": self._credit,
            "steps": sorted(self._steps.items()),
            "measured": sorted(self._measured.items()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()``."""
        self._credit, self._left = float(state["credit"]), 0
        self._steps = Counter({int(cell): int(count) for cell, count in state["steps"]})
        self._measured = Counter({int(cell): int(count) for cell, count in state["measured"]})
