"""State of an optimizer of whole tensors in a checkpoint: under Hugging Face names, so it loads under any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_tlt.actor.whole_tensors import TensorPart, WholeTensorOptimizer
from megatron_tlt.errors import RunError
from megatron_tlt.optim.flat_state import Leaf, flatten, is_plain, unflatten, without_decay
from megatron_tlt.optim.whole_tensor import further_state
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import current_device

DESCRIPTION = "whole_tensors"
"""Name of the description in a checkpoint's common state."""

ALLOWED = "allowed: the settings that it was saved with, or a new run with model.path"
"""What errors of a checkpoint from another optimizer end with."""

_GROUPS = ("several dimensions", "vectors")
_PREFIX, _MASTER, _FURTHER = "optimizer.whole", "param", "further"
_Described = dict[str, Any]
"""A leaf by path: ``{"value": v}``, or ``{"dtype": .., "shape": ..}`` of a tensor, which is stored by itself."""


def _described(leaves: dict[str, Leaf]) -> _Described:
    return {
        path: _of_tensor(leaf) if isinstance(leaf, torch.Tensor) else {"value": leaf} for path, leaf in leaves.items()
    }


def _of_tensor(leaf: torch.Tensor) -> dict[str, Any]:
    # products of matrices round otherwise if one of them lies otherwise in memory
    strides = {} if leaf.is_contiguous() else {"strides": list(leaf.stride())}
    # torch's own classes keep step counts on the host
    device = {} if leaf.device.type == current_device().torch_device.type else {"device": leaf.device.type}
    return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape), **strides, **device}


def _stored(key: str, leaf: torch.Tensor) -> ShardedTensor:
    data = leaf.detach().contiguous()
    # Megatron stores no tensor without a dimension.
    return ShardedTensor.from_rank_offsets(key, data.reshape(-1) if data.dim() == 0 else data)


def _options(part: TensorPart) -> dict[str, Any]:
    """What a class keeps in its parameter groups, by number of the group: plain values, such as a step count."""
    if part.optimizer is None:
        return {}
    left_out = {"params", *part.groups[0]}
    return {
        _GROUPS[number]: {key: value for key, value in group.items() if key not in left_out and is_plain(value)}
        for number, group in zip(part.owned_groups, part.optimizer.param_groups, strict=True)
    }


def _own_leaves(part: TensorPart) -> Iterator[tuple[str, dict[str, Leaf]]]:
    """Of each owned tensor: its name, and its float32 weights and its state."""
    for name, master in part.masters.items():
        yield name, {_MASTER: master.data, **{f"state/{k}": v for k, v in part.leaves_of(name).items()}}


def state_to_save(optimizer: WholeTensorOptimizer) -> dict[str, Any]:
    """Entries of a checkpoint's state: the tensors that this rank owns, and a description, the same on every rank.

    A collective over the world.
    """
    shards: list[ShardedTensor] = []
    parts = []
    for number, part in enumerate(optimizer.parts):
        tensors: dict[str, _Described] = {}
        for name, leaves in _own_leaves(part):
            tensors[name] = _described(leaves)
            shards += [_stored(key, leaf) for key, leaf in _tensors(f"{_PREFIX}.{name}", leaves)]
        further = {} if part.optimizer is None else flatten(further_state(part.optimizer))
        shards += [_stored(key, leaf) for key, leaf in _tensors(f"{_PREFIX}.{_FURTHER}{number}", further)]
        parts.append({"tensors": tensors, "options": _options(part), "further": _described(further)})
    everyone = all_gather_data(parts, list[dict[str, Any]])
    together = [
        {
            "class": part.choice.path,
            "tensors": {name: found for ranks in everyone for name, found in ranks[number]["tensors"].items()},
            "options": {group: found for ranks in everyone for group, found in ranks[number]["options"].items()},
            "further": next((ranks[number]["further"] for ranks in everyone if ranks[number]["further"]), {}),
        }
        for number, part in enumerate(optimizer.parts)
    ]
    # Megatron would treat an empty list as state common to all ranks
    return {DESCRIPTION: together, **({"optimizer_shards": shards} if shards else {})}


def _tensors(key: str, leaves: dict[str, Leaf]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that are stored, each under its key; those without elements are described alone."""
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            yield f"{key}.{path}", leaf


def state_to_load(
    optimizer: WholeTensorOptimizer, description: list[dict[str, Any]], folder: Path
) -> dict[str, ShardedTensor]:
    """Where this rank's tensors lie in the checkpoint in ``folder``, with memory for them, by key.

    Raises:
        RunError: the checkpoint is of other classes or other tensors.
    """
    saved, own = [part["class"] for part in description], [part.choice.path for part in optimizer.parts]
    if saved != own:
        raise RunError(
            f"{folder}: its optimizer is {' and '.join(saved)}; actor.optimizer and actor.optimizer_split give "
            f"{' and '.join(own)}; {ALLOWED}"
        )
    wanted: dict[str, ShardedTensor] = {}
    for number, (part, found) in enumerate(zip(optimizer.parts, description, strict=True)):
        if found["tensors"].keys() != part.shapes.keys():
            odd = sorted(found["tensors"].keys() ^ part.shapes.keys())[0]
            raise RunError(
                f"{folder}: it and actor.optimizer_split (or actor.lora) differ in whether {part.choice.path} steps "
                f"{odd}; {ALLOWED}"
            )
        places = [(f"{_PREFIX}.{name}", found["tensors"][name]) for name in part.masters]
        if part.masters:
            places.append((f"{_PREFIX}.{_FURTHER}{number}", found["further"]))
        for key, leaves in places:
            wanted |= {one: _stored(one, leaf) for one, leaf in _tensors(key, _allocated(leaves))}
    return wanted


def _allocated(described: _Described) -> dict[str, Leaf]:
    """The leaves, tensors without values."""
    return {path: _empty(leaf) if "dtype" in leaf else leaf["value"] for path, leaf in described.items()}


def _empty(leaf: dict[str, Any]) -> torch.Tensor:
    kind = {"dtype": getattr(torch, leaf["dtype"]), "device": leaf.get("device", current_device().torch_device)}
    if "strides" in leaf:
        return torch.empty_strided(leaf["shape"], leaf["strides"], **kind)
    return torch.empty(leaf["shape"], **kind)


def _filled(key: str, described: _Described, loaded: dict[str, torch.Tensor]) -> dict[str, Leaf]:
    leaves = _allocated(described)
    for one, leaf in _tensors(key, leaves):
        leaf.copy_(loaded[one].reshape(leaf.shape))
    return leaves


@torch.no_grad()
def restore(
    optimizer: WholeTensorOptimizer, description: list[dict[str, Any]], loaded: dict[str, torch.Tensor]
) -> None:
    """Takes over what was loaded for :func:`state_to_load`, and writes the weights into the model; a collective."""
    for number, (part, found) in enumerate(zip(optimizer.parts, description, strict=True)):
        if (inner := part.optimizer) is None:
            continue
        if found["further"]:
            further = unflatten(_filled(f"{_PREFIX}.{_FURTHER}{number}", found["further"], loaded))
            inner.load_state_dict({**inner.state_dict(), "state": {}, **further})
        for owned, group in zip(part.owned_groups, inner.param_groups, strict=True):
            group.update(without_decay(found["options"][_GROUPS[owned]]))
        for name, master in part.masters.items():
            leaves = _filled(f"{_PREFIX}.{name}", found["tensors"][name], loaded)
            values = leaves.pop(_MASTER)
            assert isinstance(values, torch.Tensor)
            master.data.copy_(values)
            inner.state.pop(master, None)
            if leaves:
                inner.state[master] = unflatten({path.removeprefix("state/"): leaf for path, leaf in leaves.items()})
    optimizer.write_back()
