"""A plan: which tasks share which devices, and each task's layout on its devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_tlt.planning.hetero.workflow import Task


class TaskLayout(NamedTuple):
    """Sizes of tensor, pipeline and data parallelism."""

    tp: int
    pp: int
    dp: int

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"{kind}{size}" for kind, size in zip(("TP", "PP", "DP"), self, strict=True) if size > 1]
        return "x".join(parts) or "1"


Grid = tuple[tuple[tuple[int, ...], ...], ...]
"""[replica][stage][tensor rank]."""


def grid(layout: TaskLayout, devices: tuple[int, ...]) -> Grid:
    """The first devices of an order: tensor ranks adjacent, then stages, then replicas."""
    tp, pp, dp = layout
    return tuple(
        tuple(devices[(replica * pp + stage) * tp : (replica * pp + stage + 1) * tp] for stage in range(pp))
        for replica in range(dp)
    )


class Placement(NamedTuple):
    """A task's order of its group's devices: the layout takes the first of them and leaves the others idle."""

    layout: TaskLayout
    order: tuple[int, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        return self.order[: self.layout.size]

    @property
    def grid(self) -> Grid:
        return grid(self.layout, self.devices)


class Plan(NamedTuple):
    """Disjoint groups that hold all tasks and all devices; a group's tasks take turns on its devices."""

    group_of: tuple[int, ...]
    """Group of each task."""
    groups: tuple[tuple[int, ...], ...]
    """Devices of each group."""
    placements: tuple[Placement, ...]
    """Of each task."""

    def shared(self, task: int) -> bool:
        """Whether the task takes turns on its devices with another."""
        return self.group_of.count(self.group_of[task]) > 1


def layouts(task: Task, size: int) -> Iterator[TaskLayout]:
    """All layouts of a task over at most ``size`` devices.

    Tensor parallelism divides the heads, and either divides the KV heads or is a multiple of them. A pipeline has at
    most one stage per layer; engines have no pipeline, as in this package.
    """
    model = task.model
    deepest = 1 if task.kind == "generate" else task.layers
    for tp in (
        t for t in range(1, size + 1) if model.heads % t == 0 and (model.groups % t == 0 or t % model.groups == 0)
    ):
        for pp in range(1, min(deepest, size // tp) + 1):
            for dp in range(1, min(task.units, size // (tp * pp)) + 1):
                yield TaskLayout(tp, pp, dp)


@dataclass(frozen=True)
class Shortage:
    """Why a plan does not fit."""

    task: str
    device: str
    what: str
    needed_bytes: float
    usable_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.task}: {self.what} needs {self.needed_bytes / 1e9:.1f} GB on {self.device}, which has "
            f"{self.usable_bytes / 1e9:.1f} GB usable"
        )
