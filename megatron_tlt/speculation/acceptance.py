"""How many tokens a request gains in a step, by strategy, while drafters and responses change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_tlt.speculation.strategy import OFF, StepObservation, Strategy

_UNKNOWN = 0.5
"""Chance of a draft token to be accepted that is assumed of a drafter never seen."""
_HOPE = 0.5
"""Requests' steps that this guess counts for."""
_LIKE = 60.0
"""Requests' steps that the drafter's other strategies count for at most, each."""
_MOST = 8
"""Requests' steps that one engine step counts for at most: a few sequences are not the many that follow."""
_CLUSTER = 1.5
"""Steps of one sequence resemble each other: variances of means are larger by this."""
_FADING = 0.002
"""A mean of so long ago as 1 / _FADING steps says no more than one request's step of now: drafters change meanwhile."""
_RECENT = 0.5 ** (1.0 / 10.0)
_RENEWED = 20.0
"""Requests' steps that all that is known of a strategy counts for at most once its drafter has a new version."""


@dataclass
class _Sums:
    """Discounted: requests' steps, those of them that had drafts, and their accepted tokens."""

    samples: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def decay(self, factor: float) -> None:
        self.samples *= factor
        self.drafted *= factor
        self.accepted *= factor

    def add(self, samples: float, drafted: float, accepted: float) -> None:
        self.samples += samples
        self.drafted += drafted
        self.accepted += accepted


def chain_moments(alpha: float, num_tokens: int) -> tuple[float, float]:
    """First two moments of the tokens accepted of a chain, each one with chance ``alpha`` if the one before it was."""
    mean = square = 0.0
    power = 1.0
    for i in range(num_tokens):
        power *= alpha
        mean += power
        square += (2 * i + 1) * power
    return mean, square


def implied_alpha(accepted: float, num_tokens: int) -> float:
    """The ``alpha`` under which ``accepted`` of a chain's ``num_tokens`` are accepted on average."""
    low, high = 0.0, 1.0
    for _ in range(16):
        alpha = (low + high) / 2
        if alpha * (1.0 - alpha**num_tokens) / (1.0 - alpha) < accepted:
            low = alpha
        else:
            high = alpha
    return (low + high) / 2


class AcceptanceLengths:
    """Tokens per request and step, by strategy, whatever the batch: verification sees each sequence for itself.

    A drafter finds drafts for a share of the requests, and their tokens are accepted one by one with chance alpha; both
    are learnt from all strategies of a drafter, the one in question first. Old steps are discounted over all steps
    (``half_life``), and those of a strategy unused for long count for little. Where the latest steps of a strategy
    contradict the earlier ones by ``drift`` standard deviations, the drafter has changed: all of its strategies drop
    what is older. Of a strategy by length it is the gain of requests that may have drafts: the batch ends with them.
    """

    def __init__(self, half_life: float = 300.0, drift: float = 3.5) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._drift = drift
        self._clock = 0
        self._all: dict[Strategy, _Sums] = {}
        self._recent: dict[Strategy, _Sums] = {}
        self._seen: dict[Strategy, int] = {}
        self.drifts = 0
        self._alphas: dict[Strategy, float] = {}
        self._known: dict[str, list[tuple[Strategy, float, float, float]]] = {}

    def observe(self, step: StepObservation) -> bool:
        """Take in a step; whether it gave a drift away."""
        self._clock += 1
        self._known.clear()
        strategy = step.strategy
        if strategy == OFF:
            return False
        self._alphas.pop(strategy, None)
        everything = self._all.setdefault(strategy, _Sums())
        recent = self._recent.setdefault(strategy, _Sums())
        if everything.samples:
            everything.decay(self.evidence(strategy) / everything.samples)
            recent.decay(min(_RECENT, everything.samples / max(recent.samples, everything.samples)))
        self._seen[strategy] = self._clock
        if step.num_draft_tokens:
            drafted, accepted = step.num_draft_tokens / strategy.num_tokens, float(step.num_accepted_tokens)
        else:
            accepted = float(step.num_tokens - step.batch)
            drafted = float(step.batch) if accepted else 0.0
        # by length, those that may have none end early anyway: what counts is how the others get on
        samples = step.num_offered_tokens / strategy.num_tokens if strategy.by_length else float(step.batch)
        weight = min(samples, _MOST) / samples if samples else 0.0
        drifted = self._is_drift(strategy)
        if drifted:
            self.drifts += 1
            for other in self._all:
                if other.drafter == strategy.drafter:
                    self._all[other].decay(0.02)
            everything = self._all[strategy] = _Sums(recent.samples, recent.drafted, recent.accepted)
        for sums in (everything, recent):
            sums.add(weight * samples, weight * drafted, weight * accepted)
        return drifted

    def _is_drift(self, strategy: Strategy) -> bool:
        everything, recent = self._all[strategy], self._recent[strategy]
        old = everything.samples - recent.samples
        if recent.samples < 6 or old < 6:
            return False
        before, now = max(0.0, everything.accepted - recent.accepted) / old, recent.accepted / recent.samples
        share = max(everything.drafted / everything.samples, 0.05)
        alpha = implied_alpha((before + now) / 2 / share, strategy.num_tokens)
        variance = _variance(share, chain_moments(alpha, strategy.num_tokens))
        return abs(now - before) > self._drift * math.sqrt(_CLUSTER * variance * (1 / recent.samples + 1 / old))

    def renew(self, drafter: str) -> None:
        """The drafter has a new version: what is known of it is a guess, and no drift is told from it."""
        self._known.clear()
        for strategy, sums in self._all.items():
            if strategy.drafter == drafter and sums.samples:
                sums.decay(min(self.evidence(strategy), _RENEWED) / sums.samples)
                self._recent[strategy] = _Sums()
                self._seen[strategy] = self._clock

    def evidence(self, strategy: Strategy) -> float:
        """Requests' steps that are known of it, discounted."""
        if strategy not in self._all:
            return 0.0
        age = self._clock - self._seen[strategy]
        samples = self._all[strategy].samples * self._decay**age
        return samples / (1.0 + max(0, age - 1) * _FADING * samples)

    def knows_drafter(self, strategy: Strategy) -> bool:
        """Whether any strategy of its drafter was ever observed."""
        return strategy == OFF or any(other.drafter == strategy.drafter for other in self._all)

    def predict(self, strategy: Strategy) -> tuple[float, float]:
        """(tokens per request and step, their standard error)."""
        if strategy == OFF:
            return 1.0, 0.0
        # as evidence ages this guess returns, and with it the hope that the drafter has become better meanwhile
        chain, found, weight, support = _HOPE * _UNKNOWN, _HOPE, _HOPE, _HOPE
        for other, evidence, share, alpha in self._known_of(strategy.drafter):
            near = evidence
            if other != strategy:
                apart = other.num_tokens - strategy.num_tokens
                near = min(near, _LIKE) / (1.0 + apart * apart / 4.0 + (other.by_length != strategy.by_length))
            found += near * share
            support += near
            weight += near * share
            chain += near * share * alpha
        share, alpha = found / support, chain / weight
        moments = chain_moments(alpha, strategy.num_tokens)
        error = math.sqrt(_CLUSTER * _variance(max(share, 0.05), moments) / (support + 0.5))
        return 1.0 + share * moments[0], error

    def _known_of(self, drafter: str) -> list[tuple[Strategy, float, float, float]]:
        """Of its strategies: evidence, share of requests with drafts, alpha. Kept: choosing asks for every strategy."""
        if drafter not in self._known:
            self._known[drafter] = [
                (strategy, self.evidence(strategy), sums.drafted / sums.samples, self._alpha(strategy, sums))
                for strategy, sums in self._all.items()
                if strategy.drafter == drafter and sums.samples
            ]
        return self._known[drafter]

    def _alpha(self, strategy: Strategy, sums: _Sums) -> float:
        if not sums.drafted:
            return 0.0
        if strategy not in self._alphas:
            self._alphas[strategy] = implied_alpha(sums.accepted / sums.drafted, strategy.num_tokens)
        return self._alphas[strategy]

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "clock": self._clock,
            "drifts": self.drifts,
            "strategies": [
                [strategy.name, self._seen[strategy], vars(self._all[strategy]), vars(self._recent[strategy])]
                for strategy in self._all
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result."""
        self._clock, self.drifts = int(state["clock"]), int(state["drifts"])
        entries = [(Strategy.parse(name), *rest) for name, *rest in state["strategies"]]
        self._seen = {strategy: int(seen) for strategy, seen, _, _ in entries}
        self._all = {strategy: _Sums(**sums) for strategy, _, sums, _ in entries}
        self._recent = {strategy: _Sums(**sums) for strategy, _, _, sums in entries}
        self._alphas.clear()
        self._known.clear()


def _variance(share: float, moments: tuple[float, float]) -> float:
    """Of a request's accepted tokens, where a ``share`` of requests has drafts, accepted as of ``chain_moments``."""
    accepted, square = moments
    return max(0.1, share * square - (share * accepted) ** 2)
