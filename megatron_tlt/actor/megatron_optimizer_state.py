"""The optimizer's tensors for a checkpoint: each rank writes the shards that it owns, without a gather.

Megatron's ``fully_reshardable`` form gathers full parameters on every save. A rank's shard is a range of a flattened
parameter, which is a small number of boxes of the same global tensor, so it can be loaded as ``fully_reshardable``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_tlt.checkpoint.boxes import boxes_of_range
from megatron_tlt.errors import RunError


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[int, ShardedTensor]]:
    """The checkpoint tensors of a model parameter, each with its offset in the flattened parameter."""
    if isinstance(entry, ShardedTensor):
        yield 0, entry
        return
    whole = torch.empty(entry.data.shape, device="meta")
    for piece in nested_values(replace(entry, data=whole).build()):
        if piece.data._base is not whole or not piece.data.is_contiguous():
            raise RunError(f"{entry.key}: its checkpoint tensors are not slices of it, as optimizer state requires")
        yield piece.data.storage_offset(), piece


def _boxes(piece: ShardedTensor, begin: int, owned: torch.Tensor, name: str) -> Iterator[ShardedTensor]:
    """The part of ``piece`` that an optimizer owns: ``owned`` (n,) begins at element ``begin`` of the flat piece."""
    size = math.prod(piece.local_shape)
    first, last = (min(max(edge, 0), size) for edge in (begin, begin + owned.numel()))
    for box in boxes_of_range(tuple(piece.local_shape), first, last):
        # Megatron ignores prepended axes of irregular shards, so they become axes of the data.
        prepended = piece.prepend_axis_num
        sizes = (1,) * prepended + box.sizes
        inner = zip((0,) * prepended + box.offsets, piece.global_offset, strict=True)
        yield replace(
            piece,
            key=f"optimizer.state.{name}.{piece.key}",
            data=owned[box.start - begin :][: math.prod(sizes)].view(sizes),
            dtype=owned.dtype,
            local_shape=sizes,
            global_offset=tuple(offset + outer for offset, outer in inner),
            axis_fragmentations=None,
            prepend_axis_num=0,
        )


def optimizer_shards(optimizer: DistributedOptimizer, model_state: dict[str, Any]) -> list[ShardedTensor]:
    """This rank's main parameters and optimizer state; float32 tensors are views. Not a collective.

    Args:
        optimizer: must have state for every parameter.
        model_state: the model's sharded state, nested in any way.

    Raises:
        RunError: a parameter's checkpoint entry does not consist of slices of it.
    """
    entries = {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    shards: list[ShardedTensor] = []
    for parameter in optimizer.model_param_gbuf_map:
        begin = optimizer._get_model_param_range_map(parameter)["param"].start
        kept = optimizer._get_main_param_and_optimizer_states(parameter)
        # The step count is a number and is saved with the parameter groups.
        owned = {name: value.detach().float() for name, value in kept.items() if name != "step"}
        for at, piece in _pieces(entries[parameter]):
            # Each data-parallel rank owns a different part; only optimizer instances are replicas.
            pipeline, tensor, _ = piece.replica_id
            own = replace(piece, replica_id=(pipeline, tensor, optimizer.distributed_optimizer_instance_id), data=None)
            for name, value in owned.items():
                shards += _boxes(own, begin - at, value, name)
    return shards
