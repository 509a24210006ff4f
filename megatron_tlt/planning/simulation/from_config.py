"""Converts a launch config to a scenario."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.config.drafter_kinds import MODEL_FREE, kind_of
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.spot import session_start
from megatron_tlt.planning.devices import DeviceSpec
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.simulation.acceptance import DraftShape
from megatron_tlt.planning.simulation.constants import Constants
from megatron_tlt.planning.simulation.lengths import LengthDistribution
from megatron_tlt.planning.simulation.scenario import Actor, Gate, Scenario, Spot

_VLLM_MEMORY, _VLLM_SEQS = 0.9, 256
"""vLLM's defaults for ``gpu_memory_utilization`` and ``max_num_seqs``."""


def scenario_of(
    config: TltConfig,
    model: ModelSize,
    device: DeviceSpec,
    constants: Constants,
    lengths: LengthDistribution,
    arms: Sequence[DraftShape],
    prompt_tokens: float | None = None,
) -> Scenario:
    """The step described by a launch config; ``arms``: speculation's strategies, the static one first.

    Without ``prompt_tokens``, a prompt has half of the longest allowed.
    """
    rollout, vllm = config.rollout, config.rollout.vllm
    layout = Layout.read(config.actor.megatron, config.launcher.world_size)
    adaptive, drafter = config.speculation.adaptive, config.drafter
    speculation = config.speculation
    kind = kind_of(speculation.drafter) if speculation.enabled and speculation.drafter not in MODEL_FREE else None
    return Scenario(
        model=model,
        device=device,
        constants=constants,
        lengths=lengths,
        devices=config.launcher.world_size,
        per_node=config.launcher.nproc_per_node,
        engine_devices=rollout.tensor_parallel_size,
        prompts=config.trainer.prompts_per_step,
        group=config.algorithm.group_size,
        prompt_tokens=rollout.max_prompt_tokens / 2 if prompt_tokens is None else prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        memory_fraction=float(vllm.get("gpu_memory_utilization", _VLLM_MEMORY)),
        max_seqs=int(vllm.get("max_num_seqs", _VLLM_SEQS)),
        arms=tuple(arms),
        actor=Actor(
            tensor=layout.tp,
            pipeline=layout.pp,
            interleaved=layout.vpp or 1,
            context=layout.cp,
            mini_batches=config.trainer.mini_batches,
            max_tokens_per_micro_batch=config.actor.max_tokens_per_micro_batch,
            recompute=config.actor.megatron.get("recompute_granularity") == "full",
            log_prob_passes=2 if config.algorithm.kl_coefficient else 1,
        ),
        num_aux_layers=0 if kind is None else kind.num_aux_layers,
        drafted=None if kind is None or not kind.own_head or drafter is None else drafter.draft_vocab_size,
        gate=Gate() if adaptive is None else Gate(adaptive.threshold, adaptive.patience, adaptive.hysteresis),
        spot=Spot(
            *session_start(config),
            min_steps=0 if config.spot is None else config.spot.min_steps,
            **({} if drafter is None else {"entries_per_step": drafter.entries_per_step, "unroll": drafter.steps}),
        ),
    )
