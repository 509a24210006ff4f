"""Seconds of the phases after a rollout: log-probs, update, reshard, and the drafter's training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.planning.simulation.scenario import Scenario

Array = NDArray[np.float64]
_BYTES = 2


def forward_flops(scenario: Scenario, lengths: Array) -> Array:
    """FLOPs of each sequence, including its prompt: two per parameter and token, and causal attention."""
    model, tokens = scenario.model, lengths + scenario.prompt_tokens
    return 2.0 * model.multiplied * tokens + 2.0 * model.layers * model.query * tokens**2


def streamed_responses(
    scenario: Scenario, ends: Array, lengths: Array, not_before: float = 0.0
) -> tuple[NDArray[np.bool_], float]:
    """Which responses of a step units of replicas train on in their bubble, and the seconds that the last is late.

    As ``trainer.stream``: a unit is idle once all of its engines are, loads the policy, and takes its own responses,
    which are consecutive here, part after part as long as the next part begins before the end.

    Args:
        ends: time at which each engine had no requests left.
        lengths: of the responses, in the order of their engines.
        not_before: time until which idle engines train the drafter.
    """
    actor = scenario.actor
    unit = int(np.lcm(scenario.engine_devices, actor.shard))
    units = scenario.devices // unit
    streamed = np.zeros(len(lengths), bool)
    if units < 2:
        return streamed, 0.0
    idle_from = np.maximum(ends.reshape(units, -1).max(axis=1), not_before)
    rate = scenario.device.flops * scenario.constants.training_efficiency
    passes = actor.log_prob_passes + actor.update_passes
    load = scenario.model.parameters * _BYTES / actor.shard / scenario.constants.wake_bandwidth
    over = late = float(ends.max())
    for own, began in zip(np.array_split(np.arange(len(lengths)), units), idle_from, strict=True):
        now = float(began) + load
        for part in np.array_split(own, max(1, round(1.0 / scenario.stream_part))):
            if now >= over:
                break
            now += passes * float(forward_flops(scenario, lengths[part]).sum()) / unit / rate
            streamed[part] = True
            late = max(late, now)
    return streamed, late - over


def training_seconds(scenario: Scenario, lengths: Array) -> dict[str, float]:
    """Seconds of log-probs and update for a step's responses, in the order of the mini-batches.

    Data-parallel ranks share a mini-batch as evenly as its longest sequence allows. A pipeline of p stages and v chunks
    is idle for the time of (p - 1) / v micro-batches (FlexTrain).
    """
    actor, dp = scenario.actor, scenario.data_parallel
    rate = actor.shard * scenario.device.flops * scenario.constants.training_efficiency
    flops = forward_flops(scenario, lengths)
    tokens = lengths + scenario.prompt_tokens

    def seconds(part: slice | NDArray[np.intp], passes: float) -> float:
        share = max(float(flops[part].sum()) / dp, float(flops[part].max(initial=0.0)))
        micro_batches = max(1.0, np.ceil(float(tokens[part].sum()) / dp / actor.max_tokens_per_micro_batch))
        bubble = (actor.pipeline - 1) / actor.interleaved / micro_batches
        return passes * share * (1.0 + bubble) / rate

    parts = np.array_split(np.arange(len(lengths)), max(1, min(actor.mini_batches, len(lengths))))
    return {
        "log_probs": seconds(slice(None), float(actor.log_prob_passes)),
        "update": sum(seconds(part, actor.update_passes) for part in parts),
    }


def reshard_seconds(scenario: Scenario) -> float:
    """Seconds in which every engine rank receives its slice over its slowest link, once its memory is mapped again."""
    constants = scenario.constants
    held = scenario.model.parameters * _BYTES / scenario.engine_devices
    link = scenario.device.node_bandwidth * constants.node_link_efficiency
    if scenario.nodes > 1:
        link = constants.network_bandwidth * constants.network_efficiency
    moved = held / link if scenario.devices > 1 else 0.0
    return moved + held / constants.wake_bandwidth


def drafter_step_flops(scenario: Scenario, mean_length: float) -> float:
    """FLOPs of one optimizer step of the drafter.

    Its weights forward and backward, and a frozen output layer forward and towards its input. EAGLE-3's own output
    layer is trained.
    """
    model, spot = scenario.model, scenario.spot
    tokens = spot.entries_per_step * scenario.devices * (mean_length + scenario.prompt_tokens)
    frozen = 0 if scenario.num_aux_layers else model.vocabulary
    return spot.unroll * tokens * (6.0 * model.draft_head(scenario.num_aux_layers, scenario.drafted) + 4.0 * frozen)


def bubble_steps(scenario: Scenario, ends: Array, responses: Array, mean_length: float) -> float:
    """Optimizer steps that idle engines complete until the last rollout ends.

    As in ``spot.coordinator``, a session starts once ``min_replicas`` engines are idle that hold ``min_entries``
    responses together; each further idle engine joins it.

    Args:
        ends: time at which each engine had no requests left.
        responses: number of responses that each engine had decoded by then.
    """
    joins = _joins(scenario, ends, responses)
    if joins is None:
        return 0.0
    return float((ends.max() - joins).sum()) / _engine_seconds(scenario, mean_length)


def drafter_done_at(scenario: Scenario, ends: Array, responses: Array, mean_length: float) -> float:
    """The time at which idle engines have made ``spot.min_steps``, from which on they stream.

    As in ``trainer.bubble``, of a drafter that has its steps and is as good as it was. 0 if no session starts; infinity
    if the last engine ends before.
    """
    joins = _joins(scenario, ends, responses)
    if joins is None:
        return 0.0
    wanted = scenario.spot.min_steps * _engine_seconds(scenario, mean_length)
    # before each event, all that have joined train since
    for at, joined in zip([*np.sort(joins)[1:], ends.max()], range(1, len(joins) + 1), strict=True):
        done = float(np.sort(joins)[:joined].sum() + wanted) / joined
        if done <= at:
            return done
    return np.inf


def _joins(scenario: Scenario, ends: Array, responses: Array) -> Array | None:
    """The time at which each engine joins the drafter's session; None if none starts."""
    spot = scenario.spot
    order = np.argsort(ends, kind="stable")
    idle = np.arange(1, len(ends) + 1)
    ready = (idle >= spot.min_replicas) & (np.cumsum(responses[order]) >= spot.min_entries)
    return np.maximum(ends, float(ends[order][np.argmax(ready)])) if ready.any() else None


def _engine_seconds(scenario: Scenario, mean_length: float) -> float:
    """Seconds of one engine for an optimizer step of the drafter."""
    rate = scenario.engine_devices * scenario.device.flops * scenario.constants.training_efficiency
    return drafter_step_flops(scenario, mean_length) / rate
