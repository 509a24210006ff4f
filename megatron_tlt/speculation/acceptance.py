"""Estimates tokens per request and step by strategy, while drafters and responses change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from megatron_tlt.speculation.strategy import OFF, BudgetMix, StepRecord, Strategy, drafters_of

_UNKNOWN = 0.5
"""Prior acceptance rate of an unseen drafter's first draft token."""
_PRIOR_WEIGHT = 0.25
"""Weight of this prior, in request steps."""
_NEXT_WEIGHT, _NEXT_SHARE = 12.0, 0.5
"""A position is evidence for the next one: with this share of its weight, up to this maximum."""
_MAX_WEIGHT = 8
"""Maximum weight of one engine step, in request steps: its requests are not a random sample of later ones."""
_CLUSTER = 1.5
"""Variance factor of means, because steps of one sequence are correlated."""
_FADING = 0.002
"""A mean from 1 / _FADING steps ago counts for at most one current request step, as drafters change."""
_RECENT = 0.5 ** (1.0 / 10.0)
_RENEWED = 20.0
"""Maximum weight of a drafter's estimate after it gets a new version, in request steps."""
_AFTER_DRIFT = 0.02
"""Share of its weight that a position without recent steps keeps after its drafter drifted."""
_FEWEST = 6.0
"""Minimum request steps of both recent and earlier evidence for the drift test."""
_LEAST_VARIANCE = 0.04
"""Margin of an acceptance rate in the drift test: a token that was always accepted is not certain to be."""


@dataclass
class _Position:
    """Discounted counts of one position in a drafter's chains, in request steps.

    ``reached``: its token could be verified, as the budget allowed it and the tokens before it were accepted.
    ``accepted``: its token was accepted too. ``recent_*``: the part of both from the latest steps. ``seen``: clock of
    its last step.
    """

    reached: float = 0.0
    accepted: float = 0.0
    recent_reached: float = 0.0
    recent_accepted: float = 0.0
    seen: int = 0

    def decay(self, factor: float) -> None:
        self.reached *= factor
        self.accepted *= factor

    def decay_recent(self, factor: float) -> None:
        self.recent_reached *= factor
        self.recent_accepted *= factor

    def add(self, reached: float, accepted: float) -> None:
        self.reached += reached
        self.accepted += accepted
        self.recent_reached += reached
        self.recent_accepted += accepted


class AcceptanceLengths:
    """Tokens per request and step of any strategy under any draft budgets.

    Each sequence is verified independently, so the estimate does not depend on the batch. It learns, per position of a
    drafter's chains, the acceptance rate given that the tokens before it were accepted. A missing draft counts as
    rejected, but not beyond a request's budget. All strategies of a source share the estimate. A request with budget b
    then gains
    ``1 + sum over j <= b of P(the first j drafts are accepted)``.

    Old steps are discounted (``half_life``, in steps of any strategy), and long unused positions lose weight. If a
    drafter's latest steps contradict the earlier ones by ``drift`` standard deviations (log-rank test over its
    positions), the drafter has changed and older evidence is discarded.
    """

    def __init__(self, half_life: float = 300.0, drift: float = 3.5) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._drift = drift
        self._clock = 0
        self._positions: dict[str, list[_Position]] = {}
        self._chains: dict[str, list[tuple[float, float]]] = {}
        self.drifts = 0

    def observe(self, step: StepRecord) -> bool:
        """Record a step; returns whether it reveals a drift."""
        self._clock += 1
        strategy = step.strategy
        self._chains.clear()  # evidence ages with each step
        allowed = (step.batch,) * strategy.num_tokens if step.budgets is None else step.budgets.at_least
        if not allowed:
            return False
        positions = self._positions.setdefault(strategy.source, [])
        positions += [_Position() for _ in range(len(allowed) - len(positions))]
        for position in positions:
            position.decay_recent(_RECENT)
        for position in positions[: len(allowed)]:
            if position.reached:
                position.decay(self._evidence(position) / position.reached)
                position.decay_recent(min(1.0, position.reached / max(position.recent_reached, 1e-9)))
            position.seen = self._clock
        drifted = self._has_drifted(positions)
        if drifted:
            self.drifts += 1
            for position in positions:
                if position.recent_reached >= 1:
                    position.reached, position.accepted = position.recent_reached, position.recent_accepted
                else:
                    position.decay(_AFTER_DRIFT)
        weight = min(allowed[0], _MAX_WEIGHT) / allowed[0]
        # requests whose earlier draft tokens were accepted and whose budget continues
        reached = float(allowed[0])
        for j, position in enumerate(positions[: len(allowed)]):
            accepted = step.accepted_per_position[j] if j < len(step.accepted_per_position) else 0
            position.add(weight * reached, weight * accepted)
            if j + 1 < len(allowed):
                reached = accepted * allowed[j + 1] / allowed[j]
        return drifted

    def _has_drifted(self, positions: list[_Position]) -> bool:
        first = positions[0]
        if first.recent_reached < _FEWEST or first.reached - first.recent_reached < _FEWEST:
            return False
        surplus = variance = 0.0
        for position in positions:
            recent, old = position.recent_reached, position.reached - position.recent_reached
            if recent > 0 and old > 0:
                rate = min(1.0, position.accepted / position.reached)
                surplus += position.recent_accepted - recent * rate
                variance += recent * old / position.reached * max(rate * (1.0 - rate), _LEAST_VARIANCE)
        return abs(surplus) > self._drift * math.sqrt(_CLUSTER * variance)

    def renew(self, drafter: str) -> None:
        """Discount the estimate of a drafter that has a new version, and restart its drift test."""
        self._chains.clear()
        for source, positions in self._positions.items():
            if drafter in drafters_of(source):
                self._renew(positions)

    def _renew(self, positions: list[_Position]) -> None:
        known = [self._evidence(position) for position in positions]
        factor = min(1.0, _RENEWED / known[0]) if known and known[0] else 1.0
        for position, evidence in zip(positions, known, strict=True):
            if position.reached:
                position.decay(factor * evidence / position.reached)
            position.decay_recent(0.0)
            position.seen = self._clock

    def _evidence(self, position: _Position) -> float:
        """Discounted weight of the evidence, in request steps."""
        age = self._clock - position.seen
        samples = position.reached * self._decay**age
        return samples / (1.0 + max(0, age - 1) * _FADING * samples)

    def knows_drafter(self, strategy: Strategy) -> bool:
        """Whether any strategy of its source was observed."""
        return strategy == OFF or strategy.source in self._positions

    def predict(self, strategy: Strategy, budgets: BudgetMix | None = None) -> tuple[float, float]:
        """(tokens per request and step, their standard error), over all requests of ``budgets``.

        At most 1 + the mean budget. None: each request may have ``strategy.num_tokens`` drafts.
        """
        if budgets is None:
            shares = [1.0] * strategy.num_tokens
        else:
            shares = [count / budgets.requests for count in budgets.at_least]
        chain = self._chain(strategy.source, len(shares))
        gains, product = [], 1.0
        for share, (rate, _) in zip(shares, chain, strict=False):
            product *= rate
            gains.append(share * product)
        # Greenwood's formula: an error of a position's rate affects all later positions
        error, rest = 0.0, 0.0
        for gain, (rate, evidence) in zip(reversed(gains), reversed(chain[: len(gains)]), strict=True):
            rest += gain
            bounded = min(0.95, max(0.05, rate))
            error += rest * rest * (1.0 - bounded) / (bounded * evidence)
        return 1.0 + sum(gains), math.sqrt(_CLUSTER * error)

    def _chain(self, source: str, num_tokens: int) -> list[tuple[float, float]]:
        """(acceptance rate given earlier acceptance, weight in request steps) of at least ``num_tokens`` positions.

        Each position's prior is the previous position, the second one's at least ``_UNKNOWN``: where the first token is
        rarely accepted, drafts are often missing, which says nothing about existing drafts.
        """
        chain = self._chains.setdefault(source, [])
        positions = self._positions.get(source, [])
        while len(chain) < num_tokens:
            j = len(chain)
            if j == 0:
                prior, weight = _UNKNOWN, _PRIOR_WEIGHT
            else:
                prior, known = chain[-1]
                prior, weight = (max(prior, _UNKNOWN) if j == 1 else prior), _NEXT_SHARE * min(known, _NEXT_WEIGHT)
            evidence = rate = 0.0
            if j < len(positions) and positions[j].reached:
                evidence = self._evidence(positions[j])
                rate = min(1.0, positions[j].accepted / positions[j].reached)
            total = evidence + weight
            chain.append(((evidence * rate + weight * prior) / total, total))
        return chain

    def state(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "clock": self._clock,
            "drifts": self.drifts,
            "drafters": {name: [list(astuple(p)) for p in positions] for name, positions in self._positions.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()``, or an earlier release's state with counts by strategy."""
        drafters = state["drafters"] if "drafters" in state else _from_strategies(state["strategies"])
        self._clock, self.drifts = int(state["clock"]), int(state["drifts"])
        self._positions = {name: [_Position(*row) for row in rows] for name, rows in drafters.items()}
        self._chains.clear()


def _from_strategies(entries: list[Any]) -> dict[str, list[tuple[float, float, float, float, int]]]:
    """Positions by drafter from an earlier release's sums by strategy, each a chain with one rate.

    The drafter's strategy with most samples is used. Strategies by length are ignored, because their sums are in units
    of full budgets, whatever the budgets were.
    """
    best: dict[str, tuple[float, list[tuple[float, float, float, float, int]]]] = {}
    for name, seen, sums, _ in entries:
        strategy = Strategy.parse(name)
        samples, drafted, accepted = (float(sums[key]) for key in ("samples", "drafted", "accepted"))
        if strategy.by_length or not samples or samples <= best.get(strategy.drafter, (0.0, []))[0]:
            continue
        rate = implied_rate(accepted / drafted, strategy.num_tokens) if drafted else 0.0
        rows, reached = [], samples
        for j in range(strategy.num_tokens):
            passed = (drafted if j == 0 else reached) * rate
            rows.append((reached, passed, 0.0, 0.0, int(seen)))
            reached = passed
        best[strategy.drafter] = samples, rows
    return {drafter: rows for drafter, (_, rows) in best.items()}


def implied_rate(accepted: float, num_tokens: int) -> float:
    """Per-token acceptance rate at which ``accepted`` of a chain's ``num_tokens`` tokens are accepted on average."""
    low, high = 0.0, 1.0
    for _ in range(16):
        rate = (low + high) / 2
        if rate * (1.0 - rate**num_tokens) / (1.0 - rate) < accepted:
            low = rate
        else:
            high = rate
    return (low + high) / 2
