"""Lets Megatron's distributed optimizer load a checkpoint of torch's own Adam, on any device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def load_step_counts() -> None:
    """Patch Megatron's setter of optimizer state once.

    Without Transformer Engine and apex, Adam is torch's. It keeps ``step`` beside its moments, and Megatron's setter
    expects tensors shaped like the shard only: a resume would end with ``KeyError: 'step'``.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if not type(self.optimizer).__module__.startswith("torch.optim"):
            original(self, model_param, tensors)
            return
        group_index, group_order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][group_order]
        state = self.optimizer.state[main_param]
        for key, value in tensors.items():
            target = main_param if key == "param" else state.get(key)
            if isinstance(target, torch.Tensor) and target.shape == value.shape:
                target.data.copy_(value)
            elif isinstance(target, torch.Tensor) and target.numel() == 1:
                target.data.fill_(value.flatten()[0].item())

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
