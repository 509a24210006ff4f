"""The strategies that a section allows, the graphs that they need, and the controller that chooses among them."""

from __future__ import annotations

from dataclasses import replace

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.graph_pool import BatchBucket, GraphPlan, capture_sizes, plan_bucketed
from megatron_tlt.speculation.length import LengthPolicy
from megatron_tlt.speculation.strategy import MODEL_FREE, OFF, Strategy
from megatron_tlt.speculation.tuners import build_tuner

_FEW = 3
"""Draft tokens of the shorter of the two default strategies of a token drafter."""
_SURE = 50
"""Acceptance probability in percent below which a strategy for costly verification does not draft."""


def strategies_of(speculation: SpeculationConfig) -> list[Strategy]:
    """All strategies that the section may activate.

    Raises:
        ConfigError: the engine does not support one of them.
    """
    most, drafter = speculation.num_speculative_tokens, speculation.drafter
    if not speculation.enabled:
        return [OFF]
    if speculation.adaptive is None:
        return [Strategy(drafter, most)]
    if not speculation.adaptive.strategies:
        return default_strategies(drafter, most, budgets=speculation.adaptive.lengths == "optimal")
    allowed = {"ngram", "suffix", drafter}
    found = [Strategy.parse(name) for name in speculation.adaptive.strategies]
    for strategy in found:
        if not allowed.issuperset(strategy.drafters) or strategy.num_tokens > most:
            raise ConfigError(
                f"speculation.adaptive.strategies: found {strategy.name}; allowed: drafters "
                f"{', '.join(sorted(allowed))} with up to speculation.num_speculative_tokens = {most}"
            )
    return found


def default_strategies(drafter: str, most: int, *, budgets: bool = False) -> list[Strategy]:
    """Off, and the drafter with every odd number of tokens below ``most`` and with ``most``; for a head also others.

    The others are suffix trees, with few tokens too, which pays in larger batches; the suffix and head pair; and head
    and pair limited to likely drafts, which pays where verification is expensive, as on a CPU. With ``budgets`` (draft
    tokens per request) all strategies draft ``most`` tokens without that limit, because budgets are computed from the
    acceptance of all drafts.
    """
    lengths = [most] if budgets else sorted({*range(1, most + 1, 2), most})
    drafting = [Strategy(drafter, length) for length in lengths]
    if drafter in MODEL_FREE:
        return [OFF, *drafting]
    pair = f"suffix+{drafter}"
    free = [Strategy("suffix", length) for length in ([most] if budgets else sorted({min(_FEW, most), most}))]
    sure = [] if budgets else [Strategy(one, most, least_percent=_SURE) for one in (drafter, pair)]
    return [OFF, *free, *drafting, Strategy(pair, most), *sure]


def build_controller(
    speculation: SpeculationConfig, max_response_tokens: int, seed: int, max_num_seqs: int | None = None
) -> SpeculationController:
    """The controller that chooses an engine's strategies, called on the engine's first rank.

    Args:
        speculation: the section; its ``adaptive`` is set.
        max_response_tokens: the rollout's.
        seed: seed of the tuner's exploration.
        max_num_seqs: maximum number of concurrent requests of the engine, if configured.

    Raises:
        ConfigError: the engine does not support a strategy, or the tuner an option.
    """
    assert speculation.adaptive is not None
    own = speculation.adaptive
    strategies = strategies_of(speculation)
    if own.lengths is not None:
        strategies = [s if s == OFF else replace(s, by_length=True) for s in strategies]
    gate = ElasticGate(own.threshold, own.patience, own.hysteresis)
    max_batch = gate.max_batch if max_num_seqs is None else min(gate.max_batch, max_num_seqs)
    try:
        tuner = build_tuner(own.tuner, strategies, own.options, seed, max_batch=max_batch)
    except ValueError as error:
        raise ConfigError(f"speculation.adaptive: {error}") from error
    by_length = own.lengths is not None or any(strategy.by_length for strategy in strategies)
    lengths = LengthPolicy(own.lengths or "classes", max_response_tokens) if by_length else None
    return SpeculationController(tuner, gate, own.hold_steps, lengths)


def pool_of(speculation: SpeculationConfig, max_num_seqs: int, max_num_batched_tokens: int) -> GraphPlan:
    """Graph pool for a section's strategies up to the gate's upper bound, and plain decoding for every batch size.

    The tuner may choose any strategy below that bound, so there is one bucket. Graphs with more tokens than a step may
    have are omitted.

    Raises:
        ConfigError: the engine does not support one of the strategies.
    """
    strategies = {OFF, *strategies_of(speculation)}
    gate = speculation.adaptive
    bound = max_num_seqs if gate is None else min(gate.threshold + gate.hysteresis, max_num_seqs)
    plan = plan_bucketed([BatchBucket(1, bound, tuple(sorted(strategies)))], bound, capture_sizes(max_num_seqs))
    fitting = tuple(graph for graph in plan.graphs if graph.num_tokens <= max_num_batched_tokens)
    return replace(plan, graphs=fitting)


def engine_graphs(
    rollout: RolloutConfig, speculation: SpeculationConfig, max_num_seqs: int, max_num_batched_tokens: int
) -> GraphPlan | None:
    """The CUDA graphs of an engine on a GPU; None if it captures none."""
    if rollout.vllm.get("enforce_eager") is True:
        return None
    return pool_of(speculation, max_num_seqs, max_num_batched_tokens)
