"""The relative speeds of a run's ranks, engines and replicas (the section ``speeds``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.speeds import engines_of, of_devices, slowest_of
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import rank, world_size
from megatron_tlt.platform.nodes import node_index


def places_of(seats: Sequence[tuple[int, int]], nodes: int, per_node: int) -> list[int]:
    """The place of each rank in a list with a number per device; pure.

    Args:
        seats: node index and local rank of each rank. torchrun orders nodes by their addresses, not by their indices.
        nodes: of the launch. Indices may have gaps, where nodes were lost. If they are not of so many nodes, as where
            something else started the ranks, ranks are in the order of the nodes.
        per_node: devices.
    """
    known = sorted({node for node, _ in seats})
    if len(known) != nodes:
        return list(range(len(seats)))
    return [known.index(node) * per_node + local for node, local in seats]


@dataclass(frozen=True)
class RankSpeeds:
    """Relative speeds by rank; None: work is divided evenly."""

    actor: list[float] | None
    rollout: list[float] | None
    engines: list[float] | None
    """Of each engine, the slowest of its ranks."""

    @classmethod
    def of(cls, config: TltConfig) -> RankSpeeds:
        """Those of the section ``speeds``; a collective over the world where there is one."""
        speeds, launcher = config.speeds, config.launcher
        if speeds is None:
            return cls(None, None, None)
        seat = (node_index(), int(os.environ.get("LOCAL_RANK", "0")))
        places = places_of(all_gather_data(seat, tuple[int, int]), launcher.nnodes, launcher.nproc_per_node)

        def by_rank(listed: Sequence[float] | None) -> list[float] | None:
            if listed is None:
                return None
            devices = of_devices(listed, launcher.nnodes, launcher.nproc_per_node)
            return [devices[place] for place in places]

        rollout = by_rank(speeds.rollout)
        engine_of = engines_of(world_size(), config.rollout.tensor_parallel_size)
        return cls(by_rank(speeds.actor), rollout, None if rollout is None else slowest_of(engine_of, rollout))

    def own_engine(self, tensor_parallel_size: int) -> float:
        """The speed of this rank's engine; 1 where work is divided evenly."""
        return 1.0 if self.engines is None else self.engines[rank() // tensor_parallel_size]
