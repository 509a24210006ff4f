"""The choice of strategy of one engine: controller and length-aware budgets put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.types import Request, Response
from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.length import LengthPolicy
from megatron_tlt.speculation.strategy import MODEL_FREE, OFF, BudgetMix, StepRecord, Strategy
from megatron_tlt.speculation.tuners import build_tuner

_FEW = 3
"""Drafts of the shorter of two strategies without a model."""
_SURE = 50
"""Chance of acceptance, in percent, below which a strategy for costly verification makes no drafts."""


def strategies_of(speculation: SpeculationConfig) -> list[Strategy]:
    """All strategies that the section may put in force.

    Raises:
        ConfigError: one that the engine cannot have.
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
    """Off, the drafter with every odd number of tokens up to ``most``, and ``most``; for a head others beside it.

    Those are suffix trees, with few tokens too, which pays in larger batches; the pair of both; and head and pair
    without drafts that they are not sure of, which pays where verifying a draft takes long, as on a CPU. Where
    ``budgets`` say how many drafts each request has, all draft ``most`` alone, and without a bound: budgets go by the
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


class AdaptiveSpeculation:
    """A ``StrategyChooser`` that learns over rollouts; one per engine, asked on its first rank.

    Args:
        speculation: the section; its ``adaptive`` is there.
        max_response_tokens: of the rollout.
        seed: of what the tuner tries.
        max_num_seqs: requests that the engine decodes at once at most, where the configuration says so.

    Raises:
        ConfigError: strategies that the engine cannot have, or options that the tuner has not.
    """

    def __init__(
        self, speculation: SpeculationConfig, max_response_tokens: int, seed: int, max_num_seqs: int | None = None
    ) -> None:
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
        self._controller = SpeculationController(tuner, gate, own.hold_steps)
        by_length = own.lengths is not None or any(strategy.by_length for strategy in strategies)
        self._lengths = LengthPolicy(own.lengths or "classes", max_response_tokens) if by_length else None
        # budgets of the drafts that the step to come makes, and of those that it verifies
        self._budgets: Mapping[str, int] | None = None
        self._verified: BudgetMix | None = None

    def drafter_changed(self, drafter: str) -> None:
        """The engine's drafter of this name has new weights."""
        self._controller.drafter_changed(drafter)

    def withhold(self, drafters: Collection[str]) -> None:
        """Leaves out the strategies of these drafters; between rollouts."""
        self._controller.withhold(drafters)

    @property
    def gate_is_open(self) -> bool:
        """Whether the batch of the step to come may speculate at all."""
        return self._controller.gate.is_open

    def begin_rollout(self, requests: Sequence[Request]) -> None:
        """These requests are about to be decoded."""
        self._controller.begin_rollout()
        self._budgets = self._verified = None
        if self._lengths is not None:
            for request in requests:
                self._lengths.start(request.request_id, request.problem_key)

    def next(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, Mapping[str, int] | None]:
        """As ``StrategyChooser.next``."""
        # the drafts of a request that has ended meanwhile are not verified
        before = self._budgets
        self._verified = None if before is None else BudgetMix.of(before[name] for name in requests if name in before)
        self._budgets = None
        if self._lengths is None:
            return self._controller.next(batch), None
        lengths, plan = self._lengths, None

        def budgets_of(strategy: Strategy) -> Mapping[str, int] | None:
            nonlocal plan
            if not strategy.by_length:
                return None
            if plan is None:
                for name, num_tokens in requests.items():
                    lengths.update(name, num_tokens)
                plan = lengths.plan(requests)
            return plan(strategy.num_tokens)

        def mix_of(strategy: Strategy) -> BudgetMix | None:
            budgets = budgets_of(strategy)
            return None if budgets is None else BudgetMix.of(budgets.values())

        strategy = self._controller.next(batch, mix_of)
        self._budgets = budgets_of(strategy)
        return strategy, self._budgets

    def make_plain(self) -> None:
        """The step to come drafts nothing, whatever ``next`` chose."""
        self._budgets = None

    def observe(self, step: StepRecord) -> None:
        """As ``StrategyChooser.observe``."""
        seen = replace(step, budgets=self._verified)
        if self._controller.observe(seen) and self._lengths is not None:
            self._lengths.observe(seen)

    def finished(self, response: Response) -> None:
        """A response has ended, by itself or because it was aborted."""
        if self._lengths is None:
            return
        if response.finish_reason == "abort":
            self._lengths.drop(response.request_id)
        else:
            draft = response.draft
            self._lengths.finish(
                response.request_id, len(response.token_ids), draft.num_draft_tokens, draft.num_accepted_tokens
            )

    def record(self, problem_key: str, num_tokens: int) -> None:
        """A response that another engine decoded."""
        if self._lengths is not None:
            self._lengths.record(problem_key, num_tokens)

    def end_rollout(self, requests: Sequence[Request]) -> None:
        """The rollout is over; what did not finish was given up."""
        if self._lengths is not None:
            for request in requests:
                self._lengths.drop(request.request_id)

    def state(self) -> dict[str, Any]:
        """All that it has learnt, as JSON."""
        return {
            "controller": self._controller.state(),
            "lengths": None if self._lengths is None else self._lengths.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result.

        Raises:
            ValueError: it is of another tuner or over other strategies.
        """
        # the lengths first: they hold whatever the tuner
        if self._lengths is not None and state["lengths"] is not None:
            self._lengths.load_state(state["lengths"])
        self._controller.load_state(state["controller"])
