"""Seconds of a plan: compute, memory traffic, pipeline bubble and communication of each task, then of the step.

Every cost decreases or stays equal when a device or a link gets faster: shares are optimal for the given figures, and
nothing else depends on the shares. The docstrings below state what the model leaves out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from megatron_tlt.planning.hetero.balance import Curve, apportion, even_split, split_layers
from megatron_tlt.planning.hetero.cluster import Cluster
from megatron_tlt.planning.hetero.memory import GRADIENT_BYTES, OPTIMIZER_BYTES, embeddings, kv_share, memory_line
from megatron_tlt.planning.hetero.plan import Grid, Plan, Shortage, TaskLayout
from megatron_tlt.planning.hetero.workflow import WEIGHT_BYTES, Task, Workflow

INFEASIBLE = 1e12
"""Seconds from which a plan does not fit; the excess measures how far it is from fitting."""
# In units of a forward pass: backward is two, and recomputation one.
_TRAIN_PASSES, _TRAIN_HEAD_PASSES = 4, 3

Stage = tuple[int, ...]
"""Classes of the devices of a tensor-parallel group, sorted."""


@dataclass(frozen=True)
class Replica:
    """Cost of one data-parallel replica; without a curve it does not fit."""

    curve: Curve | None
    layers: tuple[int, ...] = ()
    shortage: float = 0.0
    """0 if it fits, else the fraction of the model without memory, 0..1."""


@dataclass(frozen=True)
class TaskCost:
    """Seconds of a task by component; ``shortage`` is above 0 if it does not fit."""

    shortage: float
    work: float = 0.0
    """Compute, memory traffic, bubble and communication inside a replica, for the slowest replica."""
    gradients: float = 0.0
    optimizer: float = 0.0
    swap: float = 0.0
    """Offloading for the group's other tasks, and reloading."""
    shares: tuple[int, ...] = ()
    """Units (responses, micro-batches) of each replica, in the order of the sorted grid."""

    @property
    def seconds(self) -> float:
        return self.work + self.gradients + self.optimizer + self.swap


class Price(NamedTuple):
    """Seconds of a step and of each task; INFEASIBLE or more means that the plan or the task does not fit."""

    seconds: float
    tasks: tuple[float, ...]

    @property
    def feasible(self) -> bool:
        return self.seconds < INFEASIBLE


class CostModel:
    """Costs of a workflow on a cluster; ``evaluations`` counts the evaluated plans.

    Without ``balanced``, batches and layers are split evenly even over unequal devices. With ``as_run``, layers and the
    drafter's batches are, as by a run with the section ``speeds``.
    """

    def __init__(self, cluster: Cluster, workflow: Workflow, *, balanced: bool = True, as_run: bool = False) -> None:
        self.cluster, self.workflow, self.balanced, self._as_run = cluster, workflow, balanced, as_run
        self.evaluations = 0
        self.task_cost: Callable[[int, TaskLayout, Grid, bool], TaskCost] = cache(self._task_cost)
        """Cost of a task over a grid of classes (see ``classes``); the last argument: takes turns with other tasks."""
        self.replica: Callable[[int, TaskLayout, tuple[Stage, ...]], Replica] = cache(self._replica)
        """Cost of one replica's stages, each a tensor-parallel group."""
        self._collective: Callable[[Stage], tuple[float, float]] = cache(self._find_collective)
        self._pair: Callable[[Stage, Stage], tuple[float, float]] = cache(self._find_pair)
        sources = [task.weights_from for task in workflow.tasks]
        self._source = [None if name is None else workflow.index(name) for name in sources]

    def __call__(self, plan: Plan) -> Price:
        """Of a plan."""
        self.evaluations += 1
        costs = [self.task(index, plan) for index in range(len(self.workflow.tasks))]
        tasks = tuple(
            INFEASIBLE * (1 + cost.shortage) if cost.shortage else cost.seconds + self.weights(index, plan)
            for index, cost in enumerate(costs)
        )
        if shortage := sum(cost.shortage for cost in costs):
            return Price(INFEASIBLE * (1 + shortage), tasks)
        return Price(self.workflow.step_seconds(tasks, plan.group_of), tasks)

    def task(self, index: int, plan: Plan) -> TaskCost:
        """Cost of one task of a plan, without the transfer of weights to it."""
        placement = plan.placements[index]
        return self.task_cost(index, placement.layout, self.classes(placement.grid), plan.shared(index))

    def classes(self, devices: Grid) -> Grid:
        """A grid's classes instead of its devices: replicas, and tensor ranks inside a stage, in sorted order."""
        of = self.cluster.class_of
        return tuple(sorted(tuple(tuple(sorted([of[d] for d in stage])) for stage in row) for row in devices))

    def weights(self, index: int, plan: Plan) -> float:
        """Seconds until new weights have reached a task's devices, each from the nearest device that trains them.

        Senders are assumed to keep up: sending to several engines takes as long as sending to one.
        """
        source = self._source[index]
        if source is None:
            return 0.0
        nodes = frozenset(self.cluster.node_of[d] for d in plan.placements[source].devices)
        placement = plan.placements[index]
        return self.weights_seconds(
            index, placement.layout, {self.cluster.class_of[d] for d in placement.devices}, nodes
        )

    def weights_seconds(self, index: int, layout: TaskLayout, used: set[int], nodes: frozenset[int]) -> float:
        """Like ``weights``, for classes that receive and nodes that send."""
        amount = WEIGHT_BYTES * self.workflow.tasks[index].parameters / (layout.tp * layout.pp)
        return max(min(amount / rate + wait for rate, wait in self._ways(one, nodes)) for one in used)

    def _ways(self, receiver: int, nodes: frozenset[int]) -> list[tuple[float, float]]:
        device, own = self.cluster.classes[receiver]
        bandwidth, latency = self.cluster.bandwidth[own], self.cluster.latency[own]
        return [(device.node_bandwidth if node == own else bandwidth[node], latency[node]) for node in nodes]

    def _task_cost(self, index: int, layout: TaskLayout, devices: Grid, shared: bool) -> TaskCost:
        task, (tp, pp, dp) = self.workflow.tasks[index], layout
        replicas = [self.replica(index, layout, stages) for stages in devices]
        curves = [replica.curve for replica in replicas if replica.curve is not None]
        if len(curves) < dp:
            return TaskCost(shortage=sum(replica.shortage for replica in replicas) / dp)
        if self.balanced and not (self._as_run and task.drafter):
            shares, work = apportion(task.units, curves)
        else:
            shares = list(even_split(task.units, dp))
            work = max(curve(share) for curve, share in zip(curves, shares, strict=True))
        if task.kind == "generate":
            return TaskCost(0.0, work, shares=tuple(shares))
        slowest = [self.cluster.classes[one][0] for row in devices for stage in row for one in stage]
        trained = task.trained / (tp * pp)
        kept = WEIGHT_BYTES * task.parameters / (tp * pp)
        host = self.cluster.host_bandwidth
        if task.kind == "score":
            return TaskCost(0.0, work, swap=kept / host if shared else 0.0, shares=tuple(shares))
        state = OPTIMIZER_BYTES * trained / dp
        touched = 2 * state + (GRADIENT_BYTES + WEIGHT_BYTES) * trained / dp
        return TaskCost(
            0.0,
            work,
            gradients=task.updates * self._reduce(layout, devices, (GRADIENT_BYTES + WEIGHT_BYTES) * trained),
            optimizer=task.updates * touched / min(device.memory_bandwidth for device in slowest),
            swap=2 * (kept + state) / host if shared else 0.0,
            shares=tuple(shares),
        )

    def _reduce(self, layout: TaskLayout, devices: Grid, amount: float) -> float:
        """Reduce-scatter of gradients and all-gather of weights over the replicas, at the slowest stage's links.

        Assumes that a stage has the mean number of layers, and no overlap.
        """
        dp = layout.dp
        if dp == 1:
            return 0.0
        worst = 0.0
        for stage in range(layout.pp):
            members = tuple(sorted([one for row in devices for one in dict.fromkeys(row[stage])]))
            rate, wait = self._collective(members)
            worst = max(worst, (dp - 1) / dp * amount / rate + 2 * (dp - 1) * wait)
        return worst

    def _replica(self, index: int, layout: TaskLayout, stages: tuple[Stage, ...]) -> Replica:
        task = self.workflow.tasks[index]
        return (self._engine if task.kind == "generate" else self._pipeline)(task, layout, stages)

    def _slowest(self, stage: Stage) -> tuple[float, float, float]:
        """FLOP/s, memory bytes/s and usable bytes: equal shards are limited by the slowest device."""
        devices = [self.cluster.classes[one][0] for one in dict.fromkeys(stage)]
        return (
            min(device.flops for device in devices),
            min(device.memory_bandwidth for device in devices),
            min(device.memory_bytes for device in devices),
        )

    def _pipeline(self, task: Task, layout: TaskLayout, stages: tuple[Stage, ...]) -> Replica:
        """Training or scoring: (micro-batches + stages - 1) times the slowest stage, for each update."""
        layers, pp = task.layers, layout.pp
        lines = [self._stage_line(task, layout, stages, stage) for stage in range(pp)]
        caps = []
        for stage, members in enumerate(stages):
            fixed, each = memory_line(task, layout, stage)
            caps.append(min(layers, math.floor((self._slowest(members)[2] - fixed) / each)))
        table = np.full((pp, layers + 1), np.inf)
        for stage, ((fixed, each), cap) in enumerate(zip(lines, caps, strict=True)):
            if cap >= 1:
                table[stage, 1 : cap + 1] = fixed + each * np.arange(1, cap + 1)
        if self.balanced and not self._as_run:
            found = split_layers(table)
        else:
            split = even_split(layers, pp)
            slowest = max(float(table[stage, own]) for stage, own in enumerate(split))
            found = (split, slowest) if math.isfinite(slowest) else None
        if found is None:
            return Replica(None, shortage=max(1 / layers, 1 - sum(max(cap, -layers) for cap in caps) / layers))
        split, slowest = found
        return Replica(Curve(task.updates * (pp - 1) * slowest, slowest), split)

    def _stage_line(self, task: Task, layout: TaskLayout, stages: tuple[Stage, ...], stage: int) -> tuple[float, float]:
        """Seconds of a micro-batch: without layers, and per layer."""
        model, (tp, pp, _) = task.model, layout
        flops, memory, _ = self._slowest(stages[stage])
        tokens = task.micro_batch_tokens
        train = task.kind == "train"
        passes = (_TRAIN_PASSES if train else 1) + task.scores_first
        ends = (2 if train and task.drafter else _TRAIN_HEAD_PASSES if train else 1) + task.scores_first
        work = 2 * task.active_layer + 2 * task.context * model.hidden
        each = passes * (tokens * work / flops + WEIGHT_BYTES * task.layer / memory) / tp
        fixed = ends * WEIGHT_BYTES * embeddings(task, stage, pp) / (tp * memory)
        if stage == pp - 1:
            fixed += ends * tokens * 2 * model.vocabulary / (tp * flops)
        hidden = tokens * model.hidden * WEIGHT_BYTES
        if tp > 1:
            rate, wait = self._collective(stages[stage])
            each += 2 * passes * 2 * ((tp - 1) / tp * hidden / rate + (tp - 1) * wait)
        if stage > 0:
            rate, wait = self._pair(stages[stage - 1], stages[stage])
            fixed += ((2 if train else 1) + task.scores_first) * (hidden / rate + wait)
        return fixed, each

    def _engine(self, task: Task, layout: TaskLayout, stages: tuple[Stage, ...]) -> Replica:
        """Decoding reads all weights once per step; each token adds its own compute and KV reads.

        The number of steps is the longest response's tokens, or more if the KV cache limits the batch."""
        model, tp = task.model, layout.tp
        flops, memory, usable = self._slowest(stages[0])
        fixed, each = memory_line(task, layout, 0)
        free = usable - fixed - each * model.layers
        needed = kv_share(task, layout) * (task.prompt + task.longest)
        if free < needed:
            return Replica(None, shortage=min(1.0, 0.01 + (needed - free) / (needed + fixed + each * model.layers)))
        running = min(task.concurrent, math.floor(free / (kv_share(task, layout) * task.context)))
        step = WEIGHT_BYTES * (model.layers * model.layer + model.vocabulary) / (tp * memory)
        token = 2 * model.multiplied / (tp * flops) + kv_share(task, layout) * task.context / memory
        if tp > 1:
            rate, wait = self._collective(stages[0])
            reduces = 2 * model.layers * 2
            step += reduces * (tp - 1) * wait
            token += reduces * (tp - 1) / tp * model.hidden * WEIGHT_BYTES / rate
        sequence = task.response * token + task.prompt * 2 * model.multiplied / (tp * flops)
        waves = task.response / max(1, running) * step
        return Replica(Curve(task.longest * step, sequence, 0.0, sequence + waves), (model.layers,))

    def _find_pair(self, one: Stage, other: Stage) -> tuple[float, float]:
        """Bytes per second and latency in seconds between two groups: the slowest pair of devices."""
        links = [self._link(a, b) for a, b in product(dict.fromkeys(one), dict.fromkeys(other))]
        return min(rate for rate, _ in links), max(wait for _, wait in links)

    def _link(self, a: int, b: int) -> tuple[float, float]:
        (one, node), (other, far) = self.cluster.classes[a], self.cluster.classes[b]
        inside = min(one.node_bandwidth, other.node_bandwidth)
        return inside if node == far else self.cluster.bandwidth[node][far], self.cluster.latency[node][far]

    def _find_collective(self, members: Stage) -> tuple[float, float]:
        """Bandwidth and latency of a ring over devices: those of the slowest link in the best tree over its nodes.

        Within a node, the slowest device that has a peer there."""
        classes, counts = self.cluster.classes, Counter(self.cluster.classes[one][1] for one in members)
        mates = [classes[one][0].node_bandwidth for one in dict.fromkeys(members) if counts[classes[one][1]] > 1]
        nodes = list(counts)
        rate, wait = min(mates, default=math.inf), self.cluster.latency[nodes[0]][nodes[0]] if mates else 0.0
        joined, rest = [nodes[0]], set(nodes[1:])
        late = [nodes[0]], set(nodes[1:])
        while rest:
            speed, node = max((self.cluster.bandwidth[a][b], b) for a in joined for b in rest)
            rate = min(rate, speed)
            joined.append(node)
            rest.remove(node)
            delay, far = min((self.cluster.latency[a][b], b) for a in late[0] for b in late[1])
            wait = max(wait, delay)
            late[0].append(far)
            late[1].remove(far)
        return rate, wait

    def shortages(self, plan: Plan) -> list[Shortage]:
        """Memory shortages, one per task and kind of device; empty if the plan fits."""
        found: dict[tuple[str, str], Shortage] = {}
        for index, (task, placement) in enumerate(zip(self.workflow.tasks, plan.placements, strict=True)):
            if not self.task(index, plan).shortage:
                continue
            for row in placement.grid:
                stages = tuple(tuple(sorted([self.cluster.class_of[d] for d in stage])) for stage in row)
                replica = self.replica(index, placement.layout, stages)
                split = replica.layers or even_split(task.layers, placement.layout.pp)
                if replica.curve is not None:
                    continue
                for stage, (members, layers) in enumerate(zip(row, split, strict=True)):
                    needed, what = self.needed_bytes(task, placement.layout, stage, layers)
                    short = min(members, key=lambda d: self.cluster.devices[d].memory_bytes)
                    usable = self.cluster.devices[short].memory_bytes
                    if needed > usable:
                        name = self.cluster.devices[short].name
                        found.setdefault((task.name, name), Shortage(task.name, name, what, needed, usable))
        return list(found.values())

    @staticmethod
    def needed_bytes(task: Task, layout: TaskLayout, stage: int, layers: int) -> tuple[float, str]:
        """Bytes of a device with ``layers`` layers, and their use; for engines with one KV cache of maximum length."""
        fixed, each = memory_line(task, layout, stage)
        needed = fixed + each * layers
        if task.kind == "generate":
            return needed + kv_share(task, layout) * (task.prompt + task.longest), "weights and one sequence's KV cache"
        what = "weights, gradients, optimizer and activations" if task.kind == "train" else "weights and activations"
        return needed, f"{what} ({layers} layers, {layout})"
