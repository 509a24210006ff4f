"""Compares the weights of a policy's replicas by checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_tlt.actor.megatron_weights import whole_model_names
from megatron_tlt.actor.policy import Policy
from megatron_tlt.platform.collectives import all_gather_data, any_rank
from megatron_tlt.platform.nodes import node_name
from megatron_tlt.reshard.checksum import checksums
from megatron_tlt.reshard.replicas import odd_replicas

Named = tuple[str, torch.nn.Parameter]


@dataclass(frozen=True)
class OddWeights:
    """What is wrong with a rank's weights; ``tensors`` and ``proven`` as in ``reshard.replicas.OddReplica``."""

    host: str
    tensors: list[str]
    proven: bool


class ReplicaComparison:
    """Compares all parameters of a trainable policy with those of its replicas.

    Replicas of a parameter are the data-parallel x context-parallel ranks; of an expert's, its own data-parallel ranks.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._dense: list[Named] = []
        self._experts: list[Named] = []
        for name, parameter in whole_model_names(policy.model.weights, policy.model.chunks):
            # Megatron's mark of parameters whose gradients the experts' data-parallel group reduces
            (self._dense if getattr(parameter, "allreduce", True) else self._experts).append((name, parameter))

    @property
    def experts_compared(self) -> bool:
        """False if this rank has experts of which there is one replica only."""
        return not self._experts or dist.get_world_size(parallel_state.get_expert_data_parallel_group()) > 1

    @torch.no_grad()
    def run(self) -> dict[int, OddWeights]:
        """The ranks whose weights differ, the same on every rank; a collective over the world."""
        self._policy.synchronize_parameters()
        groups = (
            (self._dense, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            (self._experts, parallel_state.get_expert_data_parallel_group()),
        )
        parts = [found for named, group in groups if (found := _own_differences(named, group)) is not None]
        if not any_rank(bool(parts)):
            return {}
        mine = None
        if parts:
            tensors = [name for part in parts for name in part.tensors]
            mine = OddWeights(node_name(), tensors, all(part.proven for part in parts))
        everyone = all_gather_data(mine, OddWeights | None)
        return {rank: found for rank, found in enumerate(everyone) if found is not None}


def _own_differences(named: Sequence[Named], group: dist.ProcessGroup) -> OddWeights | None:
    """What is wrong with this rank's tensors, by the checksums of all of ``group``; a collective over it."""
    if not named or dist.get_world_size(group) == 1:
        return None
    own = torch.stack(checksums([parameter for _, parameter in named]))
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    gathered = torch.stack(rows)
    if not (gathered != own).any():
        return None
    by_rank = dict(zip(dist.get_process_group_ranks(group), gathered.tolist(), strict=True))
    found = next((odd for odd in odd_replicas(by_rank) if odd.rank == dist.get_rank()), None)
    return None if found is None else OddWeights("", [named[index][0] for index in found.tensors], found.proven)
