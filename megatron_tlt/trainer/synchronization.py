"""Which way weights go from the actor to the engines of a run."""

from __future__ import annotations

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.platform.device import world_size
from megatron_tlt.reshard.direct import DirectSync, WholeTensors
from megatron_tlt.reshard.export import ExportSync
from megatron_tlt.reshard.interface import WeightSync
from megatron_tlt.rollout.vllm_engine import VllmEngine


def engine_layout(config: TltConfig, world: int) -> str:
    """The engines' layout in words: ``TP2 x 4`` are four engines of two ranks."""
    rollout = config.rollout
    experts = " EP" if rollout.vllm.get("enable_expert_parallel") else ""
    return f"TP{rollout.tensor_parallel_size}{experts} x {world // rollout.tensor_parallel_size}"


def policy_sync(config: TltConfig, policy: Policy, engine: VllmEngine) -> WeightSync:
    """The policy's way, by ``reshard.method``."""
    if config.reshard.method == "export":
        return ExportSync(policy.export_weights, engine)
    weights, world = policy.model.weights, world_size()
    return DirectSync(
        policy.held_spans,
        engine,
        WholeTensors(weights.shapes, weights.cut_dims),
        actor_layout=str(Layout.read(config.actor.megatron, world)),
        engine_layout=engine_layout(config, world),
        staging_bytes=int(config.reshard.staging_mb * 2**20),
    )
