"""The section ``speeds``, and how fast engines and replicas are that consist of these devices; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.section import Section

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig

Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SpeedsConfig(Section):
    """Relative speeds of unequal devices, by which the work of a step is divided: ``speeds: [1, 0.5]``.

    A list has a number for each node, or for each process, in the order of the nodes. ``rollout`` divides problems
    among engines; ``actor`` divides responses among data-parallel replicas for log-probs, update and stream. One list
    in place of the section is both. An engine or a replica is as slow as its slowest device. The gradient is that of
    even shares up to the order of its sums. null: even shares.
    """

    rollout: tuple[Speed, ...] | None = None
    actor: tuple[Speed, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_list_is_both(cls, found: Any) -> Any:
        return {"rollout": found, "actor": found} if isinstance(found, (list, tuple)) else found


def of_devices(listed: Sequence[float], nodes: int, per_node: int) -> list[float]:
    """The speed of every device, from a number per device or per node."""
    if len(listed) == nodes * per_node:
        return list(listed)
    return [speed for speed in listed for _ in range(per_node)]


def slowest_of(groups: Sequence[int], speeds: Sequence[float]) -> list[float]:
    """The speed of the slowest device of each group; ``groups`` has the group of each device, from 0 on."""
    found: dict[int, float] = {}
    for group, speed in zip(groups, speeds, strict=True):
        found[group] = min(speed, found.get(group, speed))
    return [found[group] for group in range(len(found))]


def engines_of(world: int, tensor_parallel_size: int) -> list[int]:
    """The engine of each rank."""
    return [at // tensor_parallel_size for at in range(world)]


def replicas_of(world: int, layout: Layout) -> list[int]:
    """The data-parallel rank of each rank, in Megatron-Core's order: tensor, context, data, then pipeline ranks."""
    return [at // (layout.tp * layout.cp) % layout.dp for at in range(world)]


def turns(speeds: Sequence[float]) -> Iterator[int]:
    """The worker of each of endlessly many equal items: that which would end first with one more, the first of equals.

    So for every number of items the slowest worker ends as early as it can (the highest averages of Jefferson), and
    each has at least its proportional share, rounded down. Equal workers take turns.
    """
    if len(set(speeds)) == 1:
        yield from (item % len(speeds) for item in count())
    taken = [0] * len(speeds)
    while True:
        at = min(range(len(speeds)), key=lambda worker: ((taken[worker] + 1) / speeds[worker], worker))
        taken[at] += 1
        yield at


def shares_of(items: int, speeds: Sequence[float]) -> list[int]:
    """How many of so many items each worker takes; see :func:`turns`."""
    shares = [0] * len(speeds)
    for _, worker in zip(range(items), turns(speeds), strict=False):
        shares[worker] += 1
    return shares


def speeds_violations(config: TltConfig) -> Iterator[str]:
    """One line for each list that does not fit the devices, or divides nothing by speed."""
    speeds, launcher = config.speeds, config.launcher
    if speeds is None:
        return
    if speeds.rollout is None and speeds.actor is None:
        yield "speeds: found a section without rollout and actor; allowed: null, or with one of them"
    world, engine = launcher.world_size, config.rollout.tensor_parallel_size
    layout = Layout.read(config.actor.megatron, world)
    if world % engine or world % (layout.tp * layout.pp * layout.cp):
        return  # reported with the layout
    kinds = {
        "rollout": (speeds.rollout, engines_of(world, engine), "engines"),
        "actor": (speeds.actor, replicas_of(world, layout), "data-parallel replicas"),
    }
    for name, (listed, groups, what) in kinds.items():
        if listed is None:
            continue
        if len(listed) not in (launcher.nnodes, world):
            nodes = f"one for each of the {launcher.nnodes} nodes, or " if launcher.nnodes > 1 else ""
            yield f"speeds.{name}: found {len(listed)} numbers; allowed: {nodes}one for each of the {world} processes"
            continue
        devices = of_devices(listed, launcher.nnodes, launcher.nproc_per_node)
        own = slowest_of(groups, devices)
        if len(set(devices)) > 1 and len(set(own)) == 1:
            number = f"each of the {len(own)} {what} has" if len(own) > 1 else f"there is one of the {what}, with"
            yield (
                f"speeds.{name}: found {_written(listed)}; {number} a device of speed {own[0]:g}, so none gets less; "
                f"allowed: null, or a layout in which {what} differ"
            )
        elif name == "rollout" and config.trainer.prompts_per_step >= len(own):
            shares = shares_of(config.trainer.prompts_per_step, own)
            if 0 in shares:
                at = shares.index(0)
                yield (
                    f"speeds.rollout: found {_written(listed)}; engine {at}, of speed {own[at]:g}, gets none of the "
                    f"{config.trainer.prompts_per_step} problems of a step; allowed: a higher speed, or more "
                    "trainer.prompts_per_step"
                )


def speeds_of_part(config: TltConfig, nodes: Sequence[int], per_node: int) -> SpeedsConfig | None:
    """The section for a launch of some nodes of the config's, by index, with the first ``per_node`` devices of each."""
    speeds, launcher = config.speeds, config.launcher
    if speeds is None:
        return None

    def of_part(listed: Sequence[float] | None) -> tuple[float, ...] | None:
        if listed is None:
            return None
        devices, width = of_devices(listed, launcher.nnodes, launcher.nproc_per_node), launcher.nproc_per_node
        return tuple(devices[node * width + local] for node in nodes for local in range(per_node))

    return SpeedsConfig(rollout=of_part(speeds.rollout), actor=of_part(speeds.actor))


def fitting_speeds(config: TltConfig, speeds: SpeedsConfig | None) -> SpeedsConfig | None:
    """``speeds`` without the lists by which the layout of ``config`` divides nothing; None if none is left."""
    if speeds is None:
        return None
    lines = list(speeds_violations(config.model_copy(update={"speeds": speeds})))
    kept = {
        name: None if any(line.startswith(f"speeds.{name}:") for line in lines) else getattr(speeds, name)
        for name in SpeedsConfig.model_fields
    }
    return SpeedsConfig(**kept) if any(listed is not None for listed in kept.values()) else None


def _written(speeds: Sequence[float]) -> str:
    return f"[{', '.join(f'{speed:g}' for speed in speeds)}]"
