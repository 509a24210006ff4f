"""Converts a launch config to a scenario."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.config.drafter_kinds import MODEL_FREE, kind_of
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.spot import session_start
from megatron_tlt.config.stream import StreamConfig
from megatron_tlt.planning.devices import DeviceSpec
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.simulation.acceptance import DraftShape
from megatron_tlt.planning.simulation.constants import Constants
from megatron_tlt.planning.simulation.lengths import LengthDistribution
from megatron_tlt.planning.simulation.scenario import ROLLPACKER, Actor, Gate, Scenario, Spot


def scenario_of(
    config: TltConfig,
    device: DeviceSpec,
    constants: Constants,
    lengths: LengthDistribution,
    arms: Sequence[DraftShape],
    prompt_tokens: float | None = None,
) -> Scenario:
    """The step described by a launch config; ``arms``: speculation's strategies, the static one first.

    Without ``prompt_tokens``, a prompt has half of the longest allowed.
    """
    job, speculation, tail = job_of(config), config.speculation, config.tail
    layout, adaptive, drafter = job.actor.layout, speculation.adaptive, config.drafter
    kind = kind_of(speculation.drafter) if speculation.enabled and speculation.drafter not in MODEL_FREE else None
    return Scenario(
        model=job.model,
        device=device,
        constants=constants,
        lengths=lengths,
        devices=job.world,
        per_node=job.devices_per_node,
        engine_devices=job.engine.tp,
        prompts=job.prompts,
        group=config.algorithm.group_size,
        prompt_tokens=job.prompt_tokens / 2 if prompt_tokens is None else prompt_tokens,
        max_response_tokens=job.response_tokens,
        memory_fraction=job.engine.utilization,
        max_seqs=job.engine.max_sequences,
        arms=tuple(arms),
        actor=Actor(
            tensor=layout.tp,
            pipeline=layout.pp,
            interleaved=layout.vpp or 1,
            context=layout.cp,
            mini_batches=job.mini_batches,
            max_tokens_per_micro_batch=job.actor.max_tokens,
            recompute=job.actor.recompute.granularity == "full",
            log_prob_passes=2 if job.reference else 1,
        ),
        num_aux_layers=0 if kind is None else kind.num_aux_layers,
        drafted=None if kind is None or not kind.own_head or drafter is None else drafter.draft_vocab_size,
        gate=Gate() if adaptive is None else Gate(adaptive.threshold, adaptive.patience, adaptive.hysteresis),
        tail=tail or ROLLPACKER,
        schedule=config.schedule,
        stream_part=(config.stream or StreamConfig()).part,
        spot=Spot(
            *session_start(config),
            min_steps=0 if config.spot is None else config.spot.min_steps,
            **({} if drafter is None else {"entries_per_step": drafter.entries_per_step, "unroll": drafter.steps}),
        ),
    )
