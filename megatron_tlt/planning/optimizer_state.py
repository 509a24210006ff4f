"""Bytes that an optimizer keeps, from its config: Megatron's own by its options, other classes by running them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_tlt.config.optimizer import OptimizerSplitConfig
from megatron_tlt.config.schema import ActorConfig

if TYPE_CHECKING:
    from megatron_tlt.optim.choice import OptimizerChoice, TensorOptimizerChoice

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}
_MASTER, _GRADIENT = 4, 4


@dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer keeps beside the model's weights and its gradient buffers.

    Attributes:
        state_bytes: per weight, over all ranks together: a float32 copy where there is one, and the state.
        owned: what a rank owns: slices of the parameters of its stage, whole tensors of any stage, or (rank 0) all.
        step_bytes: per weight of the largest tensor, while it is stepped.
    """

    state_bytes: float
    owned: Literal["slices", "tensors", "all"] = "slices"
    step_bytes: float = 0.0


def optimizer_memory(actor: ActorConfig, bf16: bool, outside: float) -> OptimizerMemory:
    """What the optimizer of a config keeps.

    Args:
        actor: its section.
        bf16: whether the model's weights are narrow.
        outside: the share of the model's weights that is outside of its layers.

    Raises:
        ConfigError: a class does not exist or cannot be used. Without torch, classes are taken to keep two moments.
    """
    name = actor.optimizer.get("optimizer", "adam")
    if name in ("adam", "sgd") or importlib.util.find_spec("torch") is None:
        return OptimizerMemory(_megatron_bytes(actor.optimizer, bf16))
    from megatron_tlt.optim.choice import TensorOptimizerChoice, choose_optimizer

    split, decay = actor.optimizer_split, float(actor.optimizer.get("weight_decay", 0.0))
    sharding: Any = "whole" if split is not None and actor.optimizer_sharding == "auto" else actor.optimizer_sharding
    chosen = choose_optimizer(name, actor.optimizer_arguments, decay, None, sharding)
    if not isinstance(chosen, TensorOptimizerChoice):
        return OptimizerMemory(_kept(chosen) + (_MASTER if bf16 else 0))
    state = chosen.traits.state_bytes
    if split is not None:
        state = (1.0 - outside) * state + outside * _of_split(split)
    whole = _MASTER + _GRADIENT + state
    return OptimizerMemory(whole, "all" if chosen.coupled else "tensors", chosen.step_bytes())


def _of_split(split: OptimizerSplitConfig) -> float:
    from megatron_tlt.optim.choice import choose_optimizer

    return _kept(choose_optimizer(split.optimizer, split.optimizer_arguments, split.weight_decay, None, "tensor"))


def _kept(chosen: OptimizerChoice | TensorOptimizerChoice) -> float:
    from megatron_tlt.optim.choice import OptimizerChoice

    if isinstance(chosen, OptimizerChoice):
        return float(sum(dtype.itemsize for dtype in chosen.layout.tensors.values()))
    return chosen.traits.state_bytes


def _megatron_bytes(optimizer: dict[str, Any], bf16: bool) -> float:
    """Of Adam or SGD, per weight: a main copy if weights are narrow, and the moments."""
    moments = [_width(optimizer.get(f"{name}_dtype")) for name in ("exp_avg", "exp_avg_sq")]
    if optimizer.get("optimizer") == "sgd":
        moments = [4] if optimizer.get("sgd_momentum", 0.9) else []
    elif not optimizer.get("use_precision_aware_optimizer"):
        moments = [4, 4]
    main = _width(optimizer.get("main_params_dtype")) if optimizer.get("use_precision_aware_optimizer") else 4
    whole = float(sum(moments)) + (main if bf16 else 0)
    if optimizer.get("optimizer_cpu_offload"):
        whole *= 1.0 - float(optimizer.get("optimizer_offload_fraction", 0.0))
    return whole


def _width(dtype: Any) -> int:
    return _BYTES.get(str(dtype).removeprefix("torch."), 4)
