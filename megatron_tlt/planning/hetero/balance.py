"""Shares for unequal workers: a batch over replicas, layers over pipeline stages. Both are exact."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds that a worker needs for a number of units: 0 for none, else the maximum of two lines.

    ``slope`` is above 0; all other fields are at least 0.
    """

    fixed: float
    slope: float
    other_fixed: float = 0.0
    other_slope: float = 0.0

    def __call__(self, units: int) -> float:
        if units == 0:
            return 0.0
        return max(self.fixed + self.slope * units, self.other_fixed + self.other_slope * units)

    def within(self, seconds: float) -> int:
        """Largest number of units that takes at most ``seconds``, up to rounding."""
        most = (seconds - self.fixed) / self.slope
        if self.other_slope > 0:
            most = min(most, (seconds - self.other_fixed) / self.other_slope)
        elif self.other_fixed > seconds:
            return 0
        return max(0, math.floor(most))


def apportion(total: int, curves: Sequence[Curve]) -> tuple[list[int], float]:
    """Integer shares of ``total`` units that minimize the time of the slowest worker, and that time in seconds.

    Each unit goes to the worker that would end first with one more unit; this is optimal because the curves increase.
    All units that fit into a lower bound of the time are assigned at once.
    """
    if not curves:
        raise ValueError("no workers")
    if len(curves) == 1:
        return [total], curves[0](total)
    kinds = Counter(curves)
    low, high = 0.0, min(curve(total) for curve in kinds)
    for _ in range(30):
        middle = (low + high) / 2
        if sum(count * curve.within(middle) for curve, count in kinds.items()) <= total:
            low = middle
        else:
            high = middle
    shares = [curve.within(low) for curve in curves]
    left = total - sum(shares)
    heap = [(curve(share + 1), index) for index, (curve, share) in enumerate(zip(curves, shares, strict=True))]
    heapq.heapify(heap)
    for _ in range(left):
        _, index = heap[0]
        shares[index] += 1
        heapq.heapreplace(heap, (curves[index](shares[index] + 1), index))
    return shares, max(curve(share) for curve, share in zip(curves, shares, strict=True))


def split_layers(seconds: NDArray[np.float64]) -> tuple[tuple[int, ...], float] | None:
    """Layers of each stage that minimize the slowest stage's time, and that time; None if they do not fit.

    Args:
        seconds: [stages, layers + 1], a stage's time by its number of layers; infinite where its memory is too small.
            Stages without a layer are not allowed. Any table is valid; dynamic programming over stages.
    """
    width = seconds.shape[1]
    layers = width - 1
    before = _before(width)
    best = np.full(width + 1, np.inf)
    best[0] = 0.0
    chosen = []
    every = np.arange(width)
    for row in seconds:
        table = np.maximum(best[before], row)
        table[:, 0] = np.inf
        choice = table.argmin(axis=1)
        best[:width] = table[every, choice]
        chosen.append(choice)
    if not np.isfinite(best[layers]):
        return None
    split, left = [], layers
    for choice in reversed(chosen):
        split.append(int(choice[left]))
        left -= split[-1]
    return tuple(reversed(split)), float(best[layers])


@cache
def _before(width: int) -> NDArray[np.int64]:
    """[placed, own]: layers before a stage that has ``own`` of the first ``placed``; ``width`` if impossible."""
    placed, own = np.meshgrid(np.arange(width), np.arange(width), indexing="ij")
    return np.where(own <= placed, placed - own, width)


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """Integers as equal as possible, the larger ones first."""
    return tuple(total // parts + (index < total % parts) for index in range(parts))
