"""The policy's state as blocks of whole tensors, for snapshots in memory that load under any layout."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron_tlt.actor.megatron_checkpoint import restore_policy, state_to_load, state_to_save
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.memory_slots import Block, BlockSource
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import failing_together

_COMMON, _OBJECTS = "common.pt", "objects.pt"
_OPTIMIZER = "optimizer.state."


def _block(shard: ShardedTensor) -> Block:
    if shard.flattened_range is not None:
        raise RunError(f"{shard.key}: found a range of a flattened tensor; allowed: blocks of whole tensors")
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return Block(shard.key, tuple(shard.global_offset), sizes, str(shard.dtype).removeprefix("torch."))


def _bytes(shard: ShardedObject) -> torch.Tensor | None:
    """What Megatron's modules keep beside tensors: bytes that they wrote themselves, or nothing."""
    data = shard.data
    if data is not None and not isinstance(data, io.BytesIO):
        raise RunError(f"{shard.key}: found {type(data).__name__}; allowed: bytes, or nothing")
    return (
        None if data is None or not data.getvalue() else torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
    )


def blocks_to_keep(policy: Policy) -> tuple[list[tuple[Block, torch.Tensor]], dict[str, bytes]]:
    """All blocks of this rank, those that others have too, and files by name with what is not a tensor.

    So a rank of the same layout needs no other rank's blocks. A collective over the world. The tensors are views of the
    policy's, which must not change before they are copied.
    """
    # without Megatron's check over all ranks, which checkpoints have passed
    sharded, common = save_preprocess(state_to_save(policy), validate_access_integrity=False)
    objects = {}
    blocks: list[tuple[Block, torch.Tensor]] = []
    for shard in nested_values(sharded):
        if isinstance(shard, ShardedObject):
            objects[shard.unique_key] = _bytes(shard)
        else:
            assert isinstance(shard, ShardedTensor) and shard.data is not None
            block = _block(shard)
            blocks.append((block, shard.data.view(block.sizes) if shard.prepend_axis_num else shard.data))
    return blocks, {_COMMON: _written(common), _OBJECTS: _written(objects)}


def _written(plain: Any) -> bytes:
    data = io.BytesIO()
    torch.save(plain, data)
    return data.getvalue()


def _plain(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunError(f"{file}: not readable as plain data: {error}") from error


@torch.no_grad()
def load_blocks(policy: Policy, source: BlockSource, folders: list[Path], *, alike: bool) -> None:
    """Restores what :func:`blocks_to_keep` returned on the ranks of an earlier process group, of any layout.

    Args:
        policy: of the same architecture.
        source: the blocks of all ranks; of this rank alone if ``alike``.
        folders: of the same ranks, with the files.
        alike: the layout and the number of ranks are those that saved.

    Raises:
        RunError: a part is missing.
    """
    objects: dict[str, Any] = {}
    with failing_together():
        for folder in folders:
            objects |= _plain(folder / _OBJECTS)
        common = _plain(folders[0] / _COMMON)

    def loaded(shard: Any) -> Any:
        if isinstance(shard, ShardedObject):
            if shard.unique_key not in objects:
                raise RunError(f"{shard.unique_key}: no snapshot has it")
            data = objects[shard.unique_key]
            return data if data is None else io.BytesIO(data.numpy().tobytes())
        assert isinstance(shard, ShardedTensor) and shard.data is not None
        block = _block(shard)
        target = torch.empty(block.sizes, dtype=shard.data.dtype)
        if shard.allow_shape_mismatch:
            target.copy_(shard.data.view(block.sizes))
        # Megatron asks for whole parameters and takes the part that the rank owns
        trimmed = alike and block.key.startswith(_OPTIMIZER)
        source.fill(target, block.key, block.offsets, partly=shard.allow_shape_mismatch or trimmed)
        return shard.data.copy_(target.view(shard.data.shape))

    state, own, factories = load_preprocess(state_to_load(policy, common, folders[0]))
    merge(common, own)
    parts, _ = extract_sharded_base(state)
    with failing_together():
        dict_list_map_inplace(loaded, parts)
        if alike:
            source.check_all_used()
    merge(common, parts)
    restore_policy(policy, apply_factory_merges(common, factories))
