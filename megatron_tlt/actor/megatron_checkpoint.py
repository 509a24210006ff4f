"""The actor's weights, optimizer and learning-rate schedule as a Megatron distributed checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_tlt.actor.policy import Policy
from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import disk_full_error, is_disk_full


def _metadata() -> dict[str, Any]:
    """Asks for the one form of optimizer state that loads under another layout; made anew, as Megatron adds to it."""
    return {"distrib_optim_sharding_type": "fully_reshardable"}


def _optimizers(policy: Policy) -> list[Any]:
    """Megatron's optimizers behind the chain (dense and expert parameters have one each)."""
    return list(getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]))


def _allocate_state(policy: Policy) -> None:
    """Gives every parameter its optimizer state, something to save, or to load into, before the first step."""
    for wrapper in _optimizers(policy):
        if wrapper.init_state_fn is not None:
            wrapper.init_state_fn(wrapper.optimizer, wrapper.config)
        for state in wrapper.optimizer.state.values():
            if "exp_avg" in state and "step" not in state:
                state["step"] = torch.tensor(0.0)


def _keep_padding(policy: Policy) -> None:
    """Lets a buffer's padding count as content, in a checkpoint's gathering of optimizer state.

    Megatron drops each bucket's padding when it gathers a buffer, but then cuts parameters out of it by their offsets
    in the padded one: everything behind the first bucket would be saved shifted, with zeros at the end.
    """
    for wrapper in _optimizers(policy):
        for buffer in getattr(wrapper, "buffers", []):
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()


def _separate_steps(policy: Policy) -> None:
    """Megatron hands one step tensor to all parameters, which torch's Adam would then advance once for each."""
    for wrapper in _optimizers(policy):
        for state in wrapper.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    chunks = policy.model.ddp_chunks
    _allocate_state(policy)
    _keep_padding(policy)
    policy.synchronize_parameters()
    state: dict[str, Any] = {}
    for i, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{i}"] = chunk.module.sharded_state_dict(metadata=_metadata())
    state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_metadata())
    state["scheduler"] = policy.scheduler.state_dict()
    return state


def _cause(error: BaseException) -> BaseException:
    """What went wrong on a rank, out of torch's collection of all ranks' failures (which is no Exception)."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def save_policy(policy: Policy, folder: Path) -> None:
    """Writes into ``folder``, which must exist and be empty; a collective over the world.

    Raises:
        RunError: the file system refuses (full, read-only).
    """
    try:
        dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(folder))
    except (OSError, CheckpointException) as error:
        cause = _cause(error)
        if is_disk_full(cause, folder):
            raise disk_full_error(folder / "*.distcp", None) from cause
        raise RunError(f"{folder}: the checkpoint was not written: {_first_line(cause)}") from cause


@torch.no_grad()
def load_policy(policy: Policy, folder: Path) -> None:
    """Restores what :func:`save_policy` wrote, under this policy's own layout; a collective over the world.

    Raises:
        RunError: the folder holds no checkpoint that can be read.
    """
    try:
        state = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(folder))
    except (OSError, RuntimeError, CheckpointException, dist_checkpointing.core.CheckpointingException) as error:
        cause = _cause(error)
        raise RunError(f"{folder}: not a readable checkpoint: {_first_line(cause)}") from cause
    chunks = policy.model.ddp_chunks
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state["model" if len(chunks) == 1 else f"model{i}"])
    policy.optimizer.load_state_dict(state["optimizer"])
    _separate_steps(policy)
    # Its load adds the saved count to its own, which is one ahead since it was built.
    policy.scheduler.num_steps = 0
    policy.scheduler.load_state_dict(state["scheduler"])
