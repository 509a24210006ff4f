"""The actor's weights, optimizer and learning-rate schedule as a Megatron distributed checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch.distributed.checkpoint.api import CheckpointException

from megatron_tlt.actor import whole_tensor_state
from megatron_tlt.actor.megatron_optimizer_state import optimizer_shards
from megatron_tlt.actor.megatron_reader import load_common, load_sharded
from megatron_tlt.actor.megatron_writer import BackgroundWrite, cause_of, first_line
from megatron_tlt.actor.policy import Policy
from megatron_tlt.actor.whole_tensors import WholeTensorOptimizer
from megatron_tlt.errors import RunError

POLL_S = 0.01
_FORM = "fully_reshardable"
_TENSORS = "param_state"


def _metadata() -> dict[str, Any]:
    """Requests the reshardable form of optimizer state; a new dictionary each time, because Megatron modifies it."""
    return {"distrib_optim_sharding_type": _FORM}


def _optimizers(policy: Policy) -> list[Any]:
    """The optimizers of Megatron's chained optimizer (dense and expert parameters have one each)."""
    return list(getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]))


def _allocate_state(policy: Policy) -> None:
    """Allocates the optimizer state of every parameter, so that it can be saved or loaded before the first step."""
    for wrapper in _optimizers(policy):
        if wrapper.init_state_fn is not None:
            wrapper.init_state_fn(wrapper.optimizer, wrapper.config)
        for state in wrapper.optimizer.state.values():
            if "exp_avg" in state and "step" not in state:
                state["step"] = torch.tensor(0.0)


def _separate_steps(policy: Policy) -> None:
    """Gives each parameter its own step tensor; torch's Adam would advance Megatron's shared one once per parameter."""
    for wrapper in _optimizers(policy):
        for state in wrapper.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _model_state(policy: Policy) -> dict[str, Any]:
    """The sharded state of weights and schedule; also allocates the optimizers' state for saving or loading."""
    chunks = policy.model.ddp_chunks
    if not _of_whole_tensors(policy):
        _allocate_state(policy)
    policy.synchronize_parameters()
    state: dict[str, Any] = {"scheduler": policy.scheduler.state_dict()}
    for i, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{i}"] = chunk.module.sharded_state_dict(metadata=_metadata())
    return state


def _of_whole_tensors(policy: Policy) -> bool:
    return isinstance(policy.optimizer, WholeTensorOptimizer)


def state_to_save(policy: Policy) -> dict[str, Any]:
    """The sharded state of weights, optimizer and schedule, views of the policy's own; a collective over the world."""
    state = _model_state(policy)
    if _of_whole_tensors(policy):
        return state | whole_tensor_state.state_to_save(policy.optimizer)
    shards = [shard for wrapper in _optimizers(policy) for shard in optimizer_shards(wrapper, state)]
    # The number of optimizers depends on the layout: distributed experts have a separate one. Non-tensor state is
    # therefore saved separately and matched by parameter group; tensors are found by their parameters' names.
    state["optimizer_groups"] = [w.state_dict() | {"param_state_sharding_type": _FORM} for w in _optimizers(policy)]
    if shards:  # Megatron would treat an empty list as state common to all ranks
        state["optimizer_shards"] = shards
    return state


def state_to_load(policy: Policy, common: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What this layout needs of a saved state, with memory for it; a collective over the world.

    Args:
        policy: whose state it becomes.
        common: what was saved once for all ranks.
        folder: that it was saved in, for errors.

    Raises:
        RunError: it is of another kind of optimizer.
    """
    model = _model_state(policy)
    state = dict(model)
    described = common.get(whole_tensor_state.DESCRIPTION)
    if (described is not None) != _of_whole_tensors(policy):
        kinds = ["slices of parameters", "whole tensors"]
        saved, own = kinds if described is None else kinds[::-1]
        raise RunError(
            f"{folder}: its optimizer is one of {saved}, and actor.optimizer, actor.optimizer_sharding and "
            f"actor.optimizer_split give one of {own}; {whole_tensor_state.ALLOWED}"
        )
    if described is not None:
        # without tensors of its own a rank has nothing to ask for
        wanted = whole_tensor_state.state_to_load(policy.optimizer, described, folder)
        return {**state, **({"optimizer_shards": wanted} if wanted else {})}
    for i, wrapper in enumerate(_optimizers(policy)):
        for buffer in wrapper.buffers:
            # Megatron would allocate a buffer without padding, but slice parameters by offsets that include padding.
            buffer.numel_unpadded = buffer.numel
        tensors = wrapper.sharded_state_dict(model, is_loading=True, metadata=_metadata())[_TENSORS]
        state[f"optimizer{i}"] = {_TENSORS: tensors}
    return state


def _own_part(own: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The non-tensor state of one optimizer, selected from the states saved for any number of optimizers."""
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]

    def likeness(group: dict[str, Any], other: dict[str, Any]) -> int:
        return sum(group.get(key) == other.get(key) for key in param_group_identifier_keys)

    def restored(group: dict[str, Any]) -> dict[str, Any]:
        nearest = max(groups, key=lambda other: likeness(group, other))
        return {**group, **nearest, **{key: group[key] for key in param_group_identifier_keys if key in group}}

    part = {**saved[0], **{key: value for key, value in own.items() if key not in saved[0]}}
    part["optimizer"] = {
        **saved[0]["optimizer"],
        "param_groups": [restored(group) for group in own["optimizer"]["param_groups"]],
    }
    return part


def begin_save(policy: Policy, folder: Path) -> BackgroundWrite:
    """Starts to write into ``folder``, which must exist and be empty; a collective over the world.

    Training may continue at once: the state at the time of this call is written.

    Raises:
        RunError: a file operation fails, such as on a full or read-only file system.
    """
    return BackgroundWrite(state_to_save(policy), folder)


def save_weights(policy: Policy, folder: Path) -> None:
    """Writes the weights alone, for ``load_checkpoint_weights``; a collective over the world.

    Raises:
        RunError: a file operation fails.
    """
    chunks = policy.model.chunks
    state = {
        "model" if len(chunks) == 1 else f"model{i}": chunk.sharded_state_dict(metadata=_metadata())
        for i, chunk in enumerate(chunks)
    }
    _finish(BackgroundWrite(state, folder))


def save_policy(policy: Policy, folder: Path) -> None:
    """As ``begin_save``, but returns after the write."""
    _finish(begin_save(policy, folder))


def _finish(write: BackgroundWrite) -> None:
    while not write.done():
        time.sleep(POLL_S)


@torch.no_grad()
def load_policy(policy: Policy, folder: Path) -> None:
    """Restores what :func:`save_policy` wrote, under this policy's own layout; a collective over the world.

    Raises:
        RunError: the folder contains no readable checkpoint.
    """
    try:
        state = load_sharded(state_to_load(policy, load_common(folder), folder), folder)
    except (OSError, RuntimeError, CheckpointException, dist_checkpointing.core.CheckpointingException) as error:
        cause = cause_of(error)
        raise RunError(f"{folder}: not a readable checkpoint: {first_line(cause)}") from cause
    restore_policy(policy, state)


@torch.no_grad()
def restore_policy(policy: Policy, state: dict[str, Any]) -> None:
    """Takes over the loaded state of :func:`state_to_load`; a collective over the world."""
    chunks = policy.model.ddp_chunks
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state["model" if len(chunks) == 1 else f"model{i}"])
    if _of_whole_tensors(policy):
        found = state[whole_tensor_state.DESCRIPTION]
        whole_tensor_state.restore(policy.optimizer, found, state.get("optimizer_shards", {}))
    else:
        for i, wrapper in enumerate(_optimizers(policy)):
            wrapper.load_state_dict(
                {**_own_part(wrapper.state_dict(), state["optimizer_groups"]), **state[f"optimizer{i}"]}
            )
        _separate_steps(policy)
    # Loading adds the saved count to the current one, which is 1 after construction.
    policy.scheduler.num_steps = 0
    # A run that is continued for more steps falls to its last rate in these.
    steps = policy.scheduler.lr_decay_steps
    policy.scheduler.load_state_dict({**state["scheduler"], "lr_decay_steps": steps})
