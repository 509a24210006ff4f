"""The space of plans: groupings, sizes, and random plans that place communicating devices close together."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property

from megatron_tlt.planning.hetero.cluster import Cluster
from megatron_tlt.planning.hetero.plan import Placement, Plan, TaskLayout, layouts
from megatron_tlt.planning.hetero.recall import Recall
from megatron_tlt.planning.hetero.workflow import Workflow

Grouping = tuple[int, ...]
"""Group of each task, numbered in order of first appearance."""
Groups = tuple[tuple[int, ...], ...]
"""Number of devices of each group."""
_SWAPS_DRAWN = 32
"""Number of random swaps from which the best is taken."""


def groupings(tasks: int, most: int) -> Iterator[Grouping]:
    """All distinct ways to put tasks into at most ``most`` groups."""

    def extend(head: Grouping) -> Iterator[Grouping]:
        if len(head) == tasks:
            yield head
            return
        for group in range(min(max(head, default=-1) + 2, most)):
            yield from extend((*head, group))

    return extend(())


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as an ordered sum of ``parts`` positive numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


class Space:
    """Draws plans and changes them; the caller provides the random generator."""

    def __init__(self, cluster: Cluster, workflow: Workflow) -> None:
        self.cluster, self.workflow = cluster, workflow
        self.recall = Recall(cluster, len(workflow.tasks))
        self.layouts = cache(self._layouts)
        """All layouts of a task, by number, over at most so many devices."""

    @cached_property
    def groupings(self) -> list[Grouping]:
        return list(groupings(len(self.workflow.tasks), self.cluster.size))

    def _layouts(self, task: int, size: int) -> list[TaskLayout]:
        return list(layouts(self.workflow.tasks[task], size))

    def sizes(self, groups: int, rng: random.Random) -> tuple[int, ...]:
        """Devices of each group, from random cuts."""
        cuts = sorted(rng.sample(range(1, self.cluster.size), groups - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, self.cluster.size], strict=True))

    def plan(self, grouping: Grouping, sizes: Sequence[int], rng: random.Random, *, known_too: bool = False) -> Plan:
        """A random plan; most groups are whole nodes, and tensor-parallel groups lie inside them.

        With ``known_too``, a task takes the best known placement for its devices as often as a random one.
        """
        if rng.random() < 0.25:
            devices = rng.sample(range(self.cluster.size), self.cluster.size)
        else:
            devices = [one for node in self._by_node(range(self.cluster.size), rng) for one in node]
        sets: dict[int, tuple[int, ...]] = {}
        for group in rng.sample(range(len(sizes)), len(sizes)):
            sets[group], devices = tuple(sorted(devices[: sizes[group]])), devices[sizes[group] :]
        groups = tuple(sets[group] for group in range(len(sizes)))
        placements = []
        for task, group in enumerate(grouping):
            known = self.recall.best(task, groups[group]) if known_too and rng.random() < 0.5 else None
            placements.append(known or self.placement(task, groups[group], rng))
        return Plan(grouping, groups, tuple(placements))

    def placement(
        self, task: int, devices: Sequence[int], rng: random.Random, layout: TaskLayout | None = None
    ) -> Placement:
        """A random layout (unless given), more often over most of the devices than over few, and an order."""
        if layout is None:
            choices = self.layouts(task, len(devices))
            layout = (
                max(rng.choices(choices, k=2), key=lambda one: one.size) if rng.random() < 0.8 else rng.choice(choices)
            )
        return Placement(layout, self.order(devices, layout, rng))

    def order(self, devices: Sequence[int], layout: TaskLayout, rng: random.Random) -> tuple[int, ...]:
        """An order that keeps tensor-parallel groups inside nodes if possible; replicas or stages follow the nodes."""
        tp, pp, dp = layout
        chunks: list[list[int]] = []
        rest: list[int] = []
        for node in self._by_node(devices, rng):
            whole = len(node) // tp * tp
            chunks += [node[start : start + tp] for start in range(0, whole, tp)]
            rest += node[whole:]
        chunks += [rest[start : start + tp] for start in range(0, len(rest), tp)]
        used, left = chunks[: pp * dp], chunks[pp * dp :]
        if rng.random() < 0.5:
            used = [used[stage * dp + replica] for replica in range(dp) for stage in range(pp)]
        return tuple(device for chunk in used + left for device in chunk)

    def _by_node(self, devices: Sequence[int], rng: random.Random) -> list[list[int]]:
        """Devices of each node; the nodes sorted by a random criterion, or in random order."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for device in devices:
            nodes[self.cluster.node_of[device]].append(device)
        found = rng.sample(list(nodes.values()), len(nodes))
        for node in found:
            node.sort(key=lambda device: self.cluster.class_of[device])
        figure = rng.choice((None, "flops", "memory_bandwidth", "memory_bytes"))
        if figure is not None:
            found.sort(key=lambda node: -getattr(self.cluster.devices[node[0]], figure))
        return found

    # Changes of a plan

    def change_task(self, plan: Plan, seconds: Sequence[float], rng: random.Random) -> Plan:
        """Changes the layout or the order of one task, preferring long tasks, on the same devices."""
        tasks = range(len(plan.placements))
        task = rng.choice(tasks) if rng.random() < 0.5 else rng.choices(tasks, seconds)[0]
        old, devices = plan.placements[task], plan.groups[plan.group_of[task]]
        kind = rng.random()
        if kind < 0.35:
            new = self.placement(task, devices, rng)
        elif kind < 0.5:
            new = self.placement(task, devices, rng, old.layout)
        elif kind < 0.7:
            near = [
                one
                for one in self.layouts(task, len(devices))
                if sum(a != b for a, b in zip(one, old.layout, strict=True)) == 1
            ]
            layout = rng.choice(near) if near else old.layout
            new = Placement(layout, old.order) if rng.random() < 0.5 else self.placement(task, devices, rng, layout)
        else:
            new = Placement(old.layout, self._exchanged(old.order, rng))
        return self.with_placement(plan, task, new)

    def _exchanged(self, order: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
        """Exchanges two positions with devices of different classes, if there are any."""
        changed = list(order)
        a = rng.randrange(len(order))
        unlike = [b for b, one in enumerate(order) if self.cluster.class_of[one] != self.cluster.class_of[order[a]]]
        if unlike:
            b = rng.choice(unlike)
            changed[a], changed[b] = changed[b], changed[a]
        return tuple(changed)

    def swap_groups(self, plan: Plan, seconds: Sequence[float], rng: random.Random) -> Plan | None:
        """Exchanges devices of one class of a group for as many of another class of another group.

        Takes the best of several random swaps by the known seconds of each task, which needs no evaluation. None if it
        does not shorten the plan's step. Tasks take the best known placements for their new devices.
        """
        if len(plan.groups) < 2:
            return None
        now, best = self.workflow.step_seconds(tuple(seconds), plan.group_of), None
        for swap in (self._swap(plan, seconds, rng) for _ in range(_SWAPS_DRAWN)):
            if swap is not None and (then := self._expected(plan, seconds, swap)) < now:
                now, best = then, swap
        if best is None:
            return None
        placements = []
        for task, (placement, group) in enumerate(zip(plan.placements, plan.group_of, strict=True)):
            if best[group] != plan.groups[group]:
                known = self.recall.best(task, best[group])
                assert known is not None, "expected seconds imply a known placement"
                placement = known
            placements.append(placement)
        return Plan(plan.group_of, best, tuple(placements))

    def _swap(self, plan: Plan, seconds: Sequence[float], rng: random.Random) -> Groups | None:
        """The groups after a random swap; None if both drawn classes are the same."""
        one, other = self._unequal(plan, seconds, rng)
        left, right = (self._of_a_class(plan.groups[group], rng) for group in (one, other))
        if self.cluster.class_of[left[0]] == self.cluster.class_of[right[0]]:
            return None
        most = min(len(left), len(right))
        count = rng.choice((1, most, rng.randint(1, most)))
        there = dict(zip(left[:count] + right[:count], right[:count] + left[:count], strict=True))
        return tuple(tuple(sorted(there.get(d, d) for d in devices)) for devices in plan.groups)

    def _expected(self, plan: Plan, seconds: Sequence[float], groups: Groups) -> float:
        """Step seconds of a plan with other groups: each task takes its fastest known placement there."""
        counts: dict[int, list[int]] = {}
        for group, (before, after) in enumerate(zip(plan.groups, groups, strict=True)):
            if before != after:
                held = Counter(self.cluster.class_of[device] for device in after)
                counts[group] = [held[kind] for kind in range(len(self.cluster.classes))]
        expected = [
            self.recall.seconds(task, counts[group]) if group in counts else own
            for task, (own, group) in enumerate(zip(seconds, plan.group_of, strict=True))
        ]
        return self.workflow.step_seconds(tuple(expected), plan.group_of)

    @staticmethod
    def _unequal(plan: Plan, seconds: Sequence[float], rng: random.Random) -> tuple[int, int]:
        """Two groups; with probability 2/3 the first is busier than the second."""
        groups = range(len(plan.groups))
        if rng.random() < 1 / 3:
            one, other = rng.sample(groups, 2)
            return one, other
        busy = [0.0] * len(groups)
        for group, spent in zip(plan.group_of, seconds, strict=True):
            busy[group] += spent
        one = rng.choices(groups, busy)[0]
        rest = [group for group in groups if group != one]
        return one, rng.choices(rest, [1 / busy[group] for group in rest])[0]

    def _of_a_class(self, devices: Sequence[int], rng: random.Random) -> list[int]:
        kind = self.cluster.class_of[rng.choice(devices)]
        return [device for device in devices if self.cluster.class_of[device] == kind]

    @staticmethod
    def cross(plan: Plan, seconds: Sequence[float], other: Plan, others: Sequence[float]) -> Plan:
        """For each task the faster placement of two plans with one grouping, if its devices are the same."""
        placements = tuple(
            theirs if after < before and plan.groups[group] == other.groups[group] else own
            for own, theirs, before, after, group in zip(
                plan.placements, other.placements, seconds, others, plan.group_of, strict=True
            )
        )
        return plan._replace(placements=placements)

    def resized(self, plan: Plan, seconds: Sequence[float], rng: random.Random) -> Plan:
        """Moves some devices from one group to another and adapts their tasks."""
        if len(plan.groups) < 2:
            return plan
        taker, giver = self._unequal(plan, seconds, rng)
        if len(plan.groups[giver]) < 2:
            taker, giver = giver, taker
        if len(plan.groups[giver]) < 2:
            return plan
        moved = self._of_a_class(plan.groups[giver], rng)
        count = min(len(plan.groups[giver]) - 1, rng.choice((1, len(moved), rng.randint(1, len(moved)))))
        gone = set(moved[:count])
        groups = list(plan.groups)
        groups[giver] = tuple(d for d in groups[giver] if d not in gone)
        groups[taker] = tuple(sorted([*groups[taker], *gone]))
        placements = tuple(
            self._adapted(task, placement, groups[group], rng)
            for task, (placement, group) in enumerate(zip(plan.placements, plan.group_of, strict=True))
        )
        return Plan(plan.group_of, tuple(groups), placements)

    def regrouped(self, plan: Plan, rng: random.Random) -> Plan:
        """Moves one task to another group, or to a new one with some of its group's devices.

        The devices of an emptied group move with its task."""
        task = rng.randrange(len(plan.group_of))
        old = plan.group_of[task]
        alone = plan.group_of.count(old) == 1
        choices = [group for group in range(len(plan.groups)) if group != old]
        if not alone and len(plan.groups[old]) > 1:
            choices.append(len(plan.groups))
        if not choices:
            return plan
        new = rng.choice(choices)
        group_of = [new if index == task else group for index, group in enumerate(plan.group_of)]
        groups = dict(enumerate(plan.groups))
        if new == len(plan.groups):
            ordered = [one for node in self._by_node(groups[old], rng) for one in node]
            cut = rng.randint(1, len(ordered) - 1)
            groups[new], groups[old] = tuple(sorted(ordered[:cut])), tuple(sorted(ordered[cut:]))
        elif alone:
            groups[new] = tuple(sorted([*groups[new], *groups.pop(old)]))
        numbers = {group: number for number, group in enumerate(dict.fromkeys(group_of))}
        placements = tuple(
            self._adapted(index, placement, groups[group], rng)
            for index, (placement, group) in enumerate(zip(plan.placements, group_of, strict=True))
        )
        return Plan(tuple(numbers[group] for group in group_of), tuple(groups[group] for group in numbers), placements)

    def _adapted(self, task: int, placement: Placement, devices: tuple[int, ...], rng: random.Random) -> Placement:
        """A placement for changed devices: the best known, one close to the old, or a new one."""
        members, held = set(devices), set(placement.order)
        if members == held:
            return placement
        kind = rng.random()
        if kind < 0.6 and (known := self.recall.best(task, devices)) is not None:
            return known
        order = (*(d for d in placement.order if d in members), *(d for d in devices if d not in held))
        if placement.layout.size <= len(order) and kind < 0.8:
            return Placement(placement.layout, order)
        return self.placement(task, devices, rng)

    @staticmethod
    def with_placement(plan: Plan, task: int, placement: Placement) -> Plan:
        placements = list(plan.placements)
        placements[task] = placement
        return plan._replace(placements=tuple(placements))
