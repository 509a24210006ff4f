"""Cache of each task's fastest placements, for groups that contain the devices they need."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import le
from typing import NamedTuple

from megatron_tlt.planning.hetero.cluster import Cluster
from megatron_tlt.planning.hetero.plan import Placement, Plan, TaskLayout

_KEPT = 6
"""Placements of a task kept per number of devices, each with different device counts by class."""


class _Known(NamedTuple):
    seconds: float
    layout: TaskLayout
    order: tuple[int, ...]
    """Classes in the order of the grid."""
    counts: tuple[int, ...]
    """Number of devices of each class."""


class Recall:
    """Reuses placements between plans: a task's seconds depend mostly on its own devices."""

    def __init__(self, cluster: Cluster, tasks: int) -> None:
        self._class_of, self._classes = cluster.class_of, len(cluster.classes)
        self._by_size: list[dict[int, list[_Known]]] = [defaultdict(list) for _ in range(tasks)]
        self._sorted: list[list[_Known] | None] = [None] * tasks

    def learn(self, plan: Plan, seconds: Sequence[float], limit: float) -> None:
        """Adds a plan's tasks that take less than ``limit`` seconds."""
        for task, (placement, spent) in enumerate(zip(plan.placements, seconds, strict=True)):
            known = self._by_size[task][placement.layout.size]
            if spent >= limit or (len(known) == _KEPT and spent >= known[-1].seconds):
                continue
            order = tuple(self._class_of[device] for device in placement.devices)
            held = Counter(order)
            counts = tuple(held[kind] for kind in range(self._classes))
            same = next((one for one in known if one.counts == counts), None)
            if same is not None:
                if same.seconds <= spent:
                    continue
                known.remove(same)
            insort(known, _Known(spent, placement.layout, order, counts))
            del known[_KEPT:]
            self._sorted[task] = None

    def best(self, task: int, devices: Sequence[int]) -> Placement | None:
        """The fastest known placement of a task whose devices, by class, are among these."""
        free = defaultdict(list)
        for device in devices:
            free[self._class_of[device]].append(device)
        known = self._fastest(task, [len(free[kind]) for kind in range(self._classes)])
        if known is None:
            return None
        order = [free[kind].pop() for kind in known.order]
        return Placement(known.layout, (*order, *sorted(device for rest in free.values() for device in rest)))

    def seconds(self, task: int, counts: Sequence[int]) -> float:
        """Seconds of a task's fastest known placement within these device counts by class; infinite if unknown."""
        known = self._fastest(task, counts)
        return math.inf if known is None else known.seconds

    def _fastest(self, task: int, counts: Sequence[int]) -> _Known | None:
        entries = self._sorted[task]
        if entries is None:
            entries = self._sorted[task] = sorted(one for known in self._by_size[task].values() for one in known)
        return next((known for known in entries if all(map(le, known.counts, counts))), None)
