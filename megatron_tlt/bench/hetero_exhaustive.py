"""Finds the best plan by enumeration, for a handful of devices.

Two reductions lose nothing. Devices of one class are interchangeable, so sets and orders of classes replace those of
devices. A step is monotone in each task's seconds. These depend on the task's own devices and layout, on whether it
shares them, and, if it receives weights, on the sending nodes: for each combination the fastest placement is enough.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from random import Random

from megatron_tlt.planning.hetero.cost import INFEASIBLE, CostModel
from megatron_tlt.planning.hetero.plan import Grid, Placement, Plan, TaskLayout
from megatron_tlt.planning.hetero.search import HeteroSearchResult
from megatron_tlt.planning.hetero.space import Space

Bag = tuple[int, ...]
"""Classes of some devices, sorted."""


@cache
def bags_within(bag: Bag) -> tuple[Bag, ...]:
    """All distinct non-empty parts of a bag."""
    return tuple(sorted({part for size in range(1, len(bag) + 1) for part in combinations(bag, size)}))


@cache
def _without(bag: Bag, part: Bag) -> Bag:
    return tuple(sorted((Counter(bag) - Counter(part)).elements()))


@cache
def grids(bag: Bag, layout: TaskLayout) -> tuple[Grid, ...]:
    """All grids over exactly these classes; tensor ranks inside a stage, and replicas, only in sorted order."""
    tp, pp, dp = layout

    def fill(left: Bag, stages: int) -> Iterator[tuple[Bag, ...]]:
        if stages == 0:
            yield ()
            return
        for stage in sorted(set(combinations(left, tp))):
            for rest in fill(_without(left, stage), stages - 1):
                yield (stage, *rest)

    def rows(left: Bag, replicas: int, least: tuple[Bag, ...]) -> Iterator[Grid]:
        if replicas == 0:
            yield ()
            return
        for used in sorted(set(combinations(left, tp * pp))):
            for row in fill(used, pp):
                if row >= least:
                    for rest in rows(_without(left, used), replicas - 1, row):
                        yield (row, *rest)

    return tuple(rows(bag, dp, ()))


Choice = tuple[float, TaskLayout, Grid]


class Exhaustive:
    """Finds the minimum cost over the space that ``Space`` draws from."""

    def __init__(self, model: CostModel) -> None:
        self.model, self.cluster, self.workflow = model, model.cluster, model.workflow
        self.space = Space(self.cluster, self.workflow)
        self.placements = 0
        """Number of evaluated placements of single tasks."""
        self._nodes = [node for _, node in self.cluster.classes]
        sources = {task.weights_from for task in self.workflow.tasks} - {None}
        if len(sources) > 1:
            raise ValueError(f"several tasks send weights: {sorted(map(str, sources))}")
        self._trainer = self.workflow.index(str(sources.pop())) if sources else None
        self._best: dict[tuple[int, Bag, bool, frozenset[int] | None], Choice | None] = {}
        self._layouts: dict[tuple[int, Bag, bool], dict[TaskLayout, tuple[float, Grid]]] = {}

    def run(self) -> HeteroSearchResult:
        """The best plan; if none fits, ``HeteroSearchResult.feasible`` is false and its plan does not fit."""
        every: Bag = tuple(sorted(self.cluster.class_of))
        best: tuple[float, tuple[int, ...], tuple[Bag, ...], frozenset[int] | None] | None = None
        for grouping in self.space.groupings:
            count = max(grouping) + 1
            for sets in self._divisions(every, count):
                for nodes in self._senders(grouping, sets):
                    seconds = self._step(grouping, sets, nodes)
                    if seconds is not None and (best is None or seconds < best[0]):
                        best = seconds, grouping, sets, nodes
        if best is None:
            shared = (0,) * len(self.workflow.tasks)
            return HeteroSearchResult(
                self.space.plan(shared, (self.cluster.size,), Random(0)), INFEASIBLE, self.placements, ()
            )
        seconds, grouping, sets, nodes = best
        return HeteroSearchResult(self._plan(grouping, sets, nodes), seconds, self.placements, ())

    @staticmethod
    def _divisions(every: Bag, count: int) -> Iterator[tuple[Bag, ...]]:
        """All ways to divide a bag among distinguishable groups, none empty."""
        if count == 1:
            yield (every,)
            return
        for part in bags_within(every):
            if len(every) - len(part) >= count - 1:
                for rest in Exhaustive._divisions(_without(every, part), count - 1):
                    yield (part, *rest)

    def _senders(self, grouping: tuple[int, ...], sets: tuple[Bag, ...]) -> list[frozenset[int] | None]:
        """Possible nodes of the task that sends weights."""
        if self._trainer is None:
            return [None]
        found = {frozenset(self._nodes[one] for one in part) for part in bags_within(sets[grouping[self._trainer]])}
        return [*sorted(found, key=lambda nodes: tuple(sorted(nodes)))]

    def _step(self, grouping: tuple[int, ...], sets: tuple[Bag, ...], nodes: frozenset[int] | None) -> float | None:
        seconds = []
        for task, group in enumerate(grouping):
            choice = self._choice(task, sets[group], grouping.count(group) > 1, nodes)
            if choice is None:
                return None
            seconds.append(choice[0])
        return self.workflow.step_seconds(tuple(seconds), grouping)

    def _choice(self, task: int, bag: Bag, shared: bool, nodes: frozenset[int] | None) -> Choice | None:
        """The fastest placement of a task within a bag; the task that sends weights must be on all of ``nodes``."""
        trains = task == self._trainer
        if not trains and self.workflow.tasks[task].weights_from is None:
            nodes = None
        key = (task, bag, shared, nodes)
        if key not in self._best:
            found = [
                choice
                for part in bags_within(bag)
                if not trains or nodes == frozenset(self._nodes[one] for one in part)
                if (choice := self._exactly(task, part, shared, None if trains else nodes)) is not None
            ]
            self._best[key] = min(found, key=lambda choice: choice[0], default=None)
        return self._best[key]

    def _exactly(self, task: int, bag: Bag, shared: bool, nodes: frozenset[int] | None) -> Choice | None:
        """Placements over all of a bag's devices, with each layout's time for the weights."""
        best: Choice | None = None
        for layout, (seconds, devices) in self._by_layout(task, bag, shared).items():
            if nodes is not None:
                seconds += self.model.weights_seconds(task, layout, set(bag), nodes)
            if best is None or seconds < best[0]:
                best = seconds, layout, devices
        return best

    def _by_layout(self, task: int, bag: Bag, shared: bool) -> dict[TaskLayout, tuple[float, Grid]]:
        key = (task, bag, shared)
        if key not in self._layouts:
            self._layouts[key] = {}
            for layout in (one for one in self.space.layouts(task, len(bag)) if one.size == len(bag)):
                costs = [(self.model.task_cost(task, layout, one, shared), one) for one in grids(bag, layout)]
                self.placements += len(costs)
                fitting = [(cost.seconds, one) for cost, one in costs if not cost.shortage]
                if fitting:
                    self._layouts[key][layout] = min(fitting, key=lambda entry: entry[0])
        return self._layouts[key]

    def _plan(self, grouping: tuple[int, ...], sets: tuple[Bag, ...], nodes: frozenset[int] | None) -> Plan:
        """The choices of a step, with devices for classes."""
        free = defaultdict(list)
        for device, kind in enumerate(self.cluster.class_of):
            free[kind].append(device)
        groups = tuple(tuple(sorted(free[kind].pop() for kind in bag)) for bag in sets)
        placements = []
        for task, group in enumerate(grouping):
            choice = self._choice(task, sets[group], grouping.count(group) > 1, nodes)
            assert choice is not None
            _, layout, devices = choice
            own = defaultdict(list)
            for device in groups[group]:
                own[self.cluster.class_of[device]].append(device)
            order = [own[kind].pop() for row in devices for stage in row for kind in stage]
            placements.append(Placement(layout, (*order, *sorted(device for rest in own.values() for device in rest))))
        return Plan(grouping, groups, tuple(placements))
