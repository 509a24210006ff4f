"""Gradients and their norm with the same bits under every pipeline and power-of-two data-parallel size.

It stands where Megatron's ``finalize_model_grads`` and gradient norm would: Megatron accumulates in its buffers, and
neither reduces nor divides them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_tlt.actor.batches import MicroBatches
from megatron_tlt.actor.gradient_part import GradientPart, ShardParts
from megatron_tlt.actor.gradient_tree import PairwiseSum, halving_steps, own_shards
from megatron_tlt.actor.megatron_model import MegatronModel
from megatron_tlt.actor.megatron_offload import gradient_buffers
from megatron_tlt.actor.megatron_weights import shards
from megatron_tlt.actor.whole_tensors import gradient_of, sum_of_squares
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.device import current_device

_FINALIZING = "megatron.core.distributed.finalize_model_grads"
_TENSOR_SUM = "_allreduce_non_tensor_model_parallel_grads"
_STAGING_NUMEL = 32 << 20
"""Entries of a message; the receiver's buffer has as many."""


@dataclass(frozen=True)
class _OneParameter:
    """A parameter as a model chunk, as far as Megatron's sum over tensor-parallel ranks looks at one."""

    name: str
    parameter: torch.nn.Parameter
    ddp_config: Any

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield self.name, self.parameter


def _tensor_sum() -> Callable[..., None]:
    found: Callable[..., None] | None = getattr(importlib.import_module(_FINALIZING), _TENSOR_SUM, None)
    if found is None:
        raise ConfigError(
            f"elastic.strict: the installed Megatron-Core has no {_FINALIZING}.{_TENSOR_SUM}; allowed: 0.16"
        )
    return found


class StrictGradients:
    """Sums a model's gradient over logical shards in one tree (``gradient_tree``), and computes its norm.

    Args:
        model: with the distributed optimizer's gradient buffers.
        count: logical shards of each batch.

    Raises:
        ConfigError: the layout cannot form the tree, or the model's gradients are not sums over shards alone.
    """

    def __init__(self, model: MegatronModel, count: int) -> None:
        self._model, self._count = model, count
        self._group = parallel_state.get_data_parallel_group()
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._own = own_shards(count, self._ranks, self._rank)
        if model.weights.tied:
            raise ConfigError("elastic.strict: the model's embeddings are tied; allowed: a model with its own LM head")
        self._check_buffers()
        self._tensor_sum = _tensor_sum()
        self._names = {name: at for at, name in enumerate(model.weights.shapes)}

    def _check_buffers(self) -> None:
        for chunk in self._model.ddp_chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                scaled = any(bucket.gradient_scaling_factor != 1.0 for bucket in group.buckets)
                if scaled or group.intra_distributed_optimizer_instance_size != self._ranks:
                    raise ConfigError(
                        "elastic.strict: Megatron-Core would reduce gradients over other ranks than the data-parallel "
                        "ones, or scale them; allowed: one instance of the distributed optimizer, and dense layers"
                    )

    def backward(
        self,
        shards: Sequence[MicroBatches],
        sizes: Callable[[MicroBatches], torch.Tensor],
        run: Callable[[MicroBatches, GradientPart, torch.Tensor], None],
    ) -> tuple[ShardParts, torch.Tensor]:
        """Leaves the gradient of the loss over all shards in every rank's buffers; a collective over the world.

        Args:
            shards: this data-parallel rank's, in their order.
            sizes: computes those of a ``GradientPart``.
            run: zeroes the gradients and passes a shard's micro-batches, whose loss is multiplied by the number given.

        Returns:
            What the loss reported, and its denominator over all shards.
        """
        parts = ShardParts(self._count, self._own, self._group, current_device().torch_device)
        for part, batches in zip(parts.parts, shards, strict=True):
            part.add(sizes(batches))
        tokens, denominator = parts.sizes_of_all_ranks()
        scale = (tokens / denominator.clamp(min=1)).float()
        buffers = list(gradient_buffers(self._model.ddp_chunks))
        tree = PairwiseSum(buffers, len(self._own))
        with self._model.unfinished_gradients():
            for part, batches in zip(parts.parts, shards, strict=True):
                run(batches, part, scale)
                tree.add()
        if self._ranks > 1:
            for buffer in buffers:
                self._sum_over_ranks(buffer)
        self._sum_over_tensor_ranks()
        for chunk in self._model.ddp_chunks:
            chunk.scale_gradients(1.0 / float(tokens))
        return parts, denominator

    @torch.no_grad()
    def _sum_over_ranks(self, buffer: torch.Tensor) -> None:
        pieces = buffer.view(self._ranks, -1)  # Megatron pads buffers to a multiple of the ranks
        staging = torch.empty(min(_STAGING_NUMEL, pieces.shape[1]), dtype=buffer.dtype, device=buffer.device)
        for step in halving_steps(self._rank, self._ranks):
            for sent, kept in zip(step.sent, step.kept, strict=True):
                for out, own in zip(pieces[sent].split(len(staging)), pieces[kept].split(len(staging)), strict=True):
                    own += self._exchanged(out, staging[: len(own)], step.partner)
        dist.all_gather_into_tensor(buffer, pieces[self._rank], group=self._group)

    def _exchanged(self, sent: torch.Tensor, received: torch.Tensor, partner: int) -> torch.Tensor:
        peer = dist.get_global_rank(self._group, partner)
        messages = ((dist.isend, sent), (dist.irecv, received))
        operations = [dist.P2POp(start, tensor, peer, group=self._group) for start, tensor in messages]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def _sum_over_tensor_ranks(self) -> None:
        """Megatron's sum of the gradients of norms, each parameter by itself.

        In one message with the others of a stage, as Megatron sends them, the order of a ring's additions would depend
        on what else the stage has.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        if dist.get_world_size(group) == 1:
            return
        for wrapped, chunk in zip(self._model.ddp_chunks, self._model.chunks, strict=True):
            for name, parameter in chunk.named_parameters():
                one = _OneParameter(name, parameter, wrapped.ddp_config)
                self._tensor_sum([one], self._model.config, group)

    @torch.no_grad()
    def norm(self) -> float:
        """The norm of the whole gradient in the buffers; a collective over the world.

        The sum of squares of each Hugging Face tensor, in float64, and the sum of these in their order. A tensor that
        tensor-parallel ranks share has one summand for each.
        """
        tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        squares = torch.zeros(
            (len(self._names), tensor_ranks), dtype=torch.float64, device=current_device().torch_device
        )
        for shard in shards(self._model.weights, self._model.chunks):
            gradient = gradient_of(shard.parameter)
            for piece in shard.pieces:
                at = self._names[piece.name]
                if shard.exported and at % self._ranks == self._rank:  # replicas share the work
                    view = gradient.narrow(piece.dim, piece.offset, piece.length)
                    squares[at, rank] += sum_of_squares(view)
        dist.all_reduce(squares)  # at each entry only one rank's is nonzero
        return math.sqrt(math.fsum(squares.flatten().tolist()))
