"""Weight synchronization of a run's engines: policy weights from the actor, drafter weights from their ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.models.lora_weights import adapter_cut_dims, adapter_shapes
from megatron_tlt.platform.device import current_device, world_size
from megatron_tlt.reshard.adapters import AdapterSync, MergingTarget
from megatron_tlt.reshard.direct import DirectSync, WholeTensors
from megatron_tlt.reshard.interface import NoTransfer, SpanViews, WeightSync
from megatron_tlt.reshard.spans import Span
from megatron_tlt.rollout.interface import RolloutEngine

# Row-parallel layers, under any prefix.
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


def engine_layout(config: TltConfig, world: int) -> str:
    """The engines' layout as text: ``TP2 x 4`` means four engines of two ranks each."""
    rollout = config.rollout
    experts = " EP" if rollout.expert_parallel else ""
    return f"TP{rollout.tensor_parallel_size}{experts} x {world // rollout.tensor_parallel_size}"


def wake(engine: RolloutEngine, part: str) -> float:
    """Wakes the ``part`` of the engine's memory, weights or kv_cache; returns the seconds that it takes."""
    current_device().note_peak()
    began = time.perf_counter()
    engine.wake_up([part])
    return time.perf_counter() - began


def drafter_sync(
    config: TltConfig,
    newest: Callable[[], Mapping[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    engine: RolloutEngine,
) -> WeightSync:
    """The weight synchronization of the drafter.

    Args:
        config: of the run.
        newest: returns the newest drafter's full tensors on the ranks that have them, and none on the others.
        shapes: of the tensors, under their names in the drafter's folder.
        engine: this rank's engine.
    """
    cut_dims = {name: int(name.endswith(_BY_COLUMNS)) for name in shapes}

    def held() -> SpanViews:
        return [(Span(name, 0, tensor.shape[cut_dims[name]]), tensor) for name, tensor in newest().items()]

    return DirectSync(
        held,
        engine,
        WholeTensors(shapes, cut_dims),
        source_layout="drafter",
        engine_layout=engine_layout(config, world_size()),
        staging_bytes=int(config.reshard.staging_mb * 2**20),
        part="drafter",
    )


def policy_sync(config: TltConfig, policy: Policy, engine: RolloutEngine) -> WeightSync:
    """The weight synchronization of the policy, by ``reshard.method``."""
    if config.reshard.method == "none":
        return NoTransfer()
    weights, world = policy.model.weights, world_size()
    made = partial(
        DirectSync,
        source_layout=f"actor {Layout.read(config.actor.megatron, world)}",
        engine_layout=engine_layout(config, world),
        staging_bytes=int(config.reshard.staging_mb * 2**20),
    )
    base = made(policy.held_spans, engine, WholeTensors(weights.shapes, weights.cut_dims))
    if (lora := policy.lora) is None:
        return base
    shapes = adapter_shapes(weights.shapes, lora.targets, lora.rank)
    target = MergingTarget(engine, shapes, lora.alpha / lora.rank)
    whole = WholeTensors(shapes, adapter_cut_dims(weights.cut_dims, shapes))
    return AdapterSync(base, made(policy.adapter_spans, target, whole), target)
