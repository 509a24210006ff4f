"""Bytes that an optimizer keeps, from its config: Megatron's own by its options, other classes by running them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import ConfigError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}
_MASTER, _GRADIENT = 4, 4


@dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer keeps beside the model's weights and its gradient buffers.

    Attributes:
        state_bytes: per weight, over all ranks together: a float32 copy where there is one, and the state.
        owned: what a rank owns: slices of the parameters of its stage, whole tensors of any stage, or (rank 0) all.
        step_bytes: per weight of the largest tensor that ``actor.optimizer`` steps, while it does.
        split_bytes: as above, of the split's class.
        unknown: why the class could not be run here; its state is then taken to be two moments of slices.
    """

    state_bytes: float
    owned: Literal["slices", "tensors", "all"] = "slices"
    step_bytes: float = 0.0
    split_bytes: float = 0.0
    unknown: str = ""


def optimizer_memory(actor: ActorConfig, bf16: bool, outside: float) -> OptimizerMemory:
    """What the optimizer of a config keeps; the classes that it names are run on the CPU.

    Args:
        actor: its section.
        bf16: whether the model's weights are narrow.
        outside: the share of the trained weights that is outside of the model's layers.
    """
    name, sharding = actor.optimizer.get("optimizer", "adam"), actor.optimizer_sharding
    own = _megatron_bytes(actor.optimizer, bf16)
    if name == "adam" or (name == "sgd" and sharding in ("auto", "element")):
        return OptimizerMemory(own)
    if importlib.util.find_spec("torch") is None:
        return OptimizerMemory(own, unknown="torch is not installed")
    try:
        return _by_running(actor, bf16, outside)
    except ConfigError as error:
        return OptimizerMemory(own, unknown=str(error))


def _by_running(actor: ActorConfig, bf16: bool, outside: float) -> OptimizerMemory:
    from megatron_tlt.optim.choice import TensorOptimizerChoice, choose_actor_optimizers

    chosen, others = choose_actor_optimizers(actor, None)
    if not isinstance(chosen, TensorOptimizerChoice):
        assert chosen is not None
        slices = sum(dtype.itemsize for dtype in chosen.layout.tensors.values())
        return OptimizerMemory(slices + (_MASTER if bf16 else 0))
    state = chosen.traits.state_bytes
    if others is not None:
        state = (1.0 - outside) * state + outside * others.traits.state_bytes
    return OptimizerMemory(
        _MASTER + _GRADIENT + state,
        "all" if chosen.coupled else "tensors",
        chosen.step_bytes(),
        others.step_bytes() if others is not None else 0.0,
    )


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
