"""Report of a plan as plain data: assignment, shares, layers, seconds and memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.planning.hetero.cost import CostModel
from megatron_tlt.planning.hetero.plan import Plan


@dataclass(frozen=True)
class StageReport:
    """One tensor-parallel group."""

    devices: tuple[str, ...]
    kind: str
    layers: int
    needed_bytes: float
    """Bytes on its device with the least memory; for engines weights and one sequence's KV cache (free memory is cache
    too)."""
    usable_bytes: float


@dataclass(frozen=True)
class ReplicaReport:
    share: int
    stages: tuple[StageReport, ...]


@dataclass(frozen=True)
class TaskReport:
    name: str
    group: int
    layout: str
    unit: str
    """Unit of ``share``."""
    ends_at: float
    """Seconds since the start of the step; asynchronously, since the start of its group's turn."""
    seconds: dict[str, float]
    """Seconds by component; ``weights`` is the transfer of new weights to the task."""
    unused: tuple[str, ...]
    """Devices of its group that it leaves idle."""
    replicas: tuple[ReplicaReport, ...]

    @property
    def margin(self) -> float:
        """Smallest fraction of usable memory left on a device."""
        stages = [stage for replica in self.replicas for stage in replica.stages]
        return min(1 - stage.needed_bytes / stage.usable_bytes for stage in stages)


@dataclass(frozen=True)
class PlanReport:
    step_seconds: float
    asynchronous: bool
    shortages: tuple[str, ...]
    """Memory shortages; empty if the plan fits."""
    tasks: tuple[TaskReport, ...]


def describe(model: CostModel, plan: Plan) -> PlanReport:
    """Everything the cost model states about a plan."""
    price = model(plan)
    shortages = tuple(map(str, model.shortages(plan)))
    if shortages:
        return PlanReport(price.seconds, model.workflow.asynchronous, shortages, ())
    ends = model.workflow.ends(price.tasks, plan.group_of)
    tasks = tuple(_task(model, plan, index, ends[index]) for index in range(len(ends)))
    return PlanReport(price.seconds, model.workflow.asynchronous, (), tasks)


def _task(model: CostModel, plan: Plan, index: int, end: float) -> TaskReport:
    task, placement, cluster = model.workflow.tasks[index], plan.placements[index], model.cluster
    cost = model.task(index, plan)
    # shares are in the order of the grid of classes
    rows = sorted(placement.grid, key=lambda row: model.classes((row,)))
    replicas = []
    for row, share in zip(rows, cost.shares, strict=True):
        layers = model.replica(index, placement.layout, model.classes((row,))[0]).layers
        stages = []
        for stage, (members, own) in enumerate(zip(row, layers, strict=True)):
            devices = [cluster.devices[device] for device in members]
            stages.append(
                StageReport(
                    tuple(map(cluster.label, members)),
                    " + ".join(dict.fromkeys(device.name for device in devices)),
                    own,
                    model.needed_bytes(task, placement.layout, stage, own)[0],
                    min(device.memory_bytes for device in devices),
                )
            )
        replicas.append(ReplicaReport(share, tuple(stages)))
    seconds = {part: getattr(cost, part) for part in ("work", "gradients", "optimizer", "swap")}
    return TaskReport(
        task.name,
        plan.group_of[index],
        str(placement.layout),
        "responses" if task.kind == "generate" else "micro-batches",
        end,
        seconds | {"weights": model.weights(index, plan)},
        tuple(map(cluster.label, sorted(placement.order[placement.layout.size :]))),
        tuple(replicas),
    )
