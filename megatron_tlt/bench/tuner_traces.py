"""Rollouts without an engine: the cost and gain of a step under each strategy, with realistic noise."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable

import numpy as np

from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.strategy import OFF, BudgetMix, StepRecord, Strategy

STRATEGIES = (OFF, *(Strategy(drafter, k) for drafter in ("ngram", "eagle") for k in (1, 3, 5, 7)))
BY_LENGTH = tuple(s if s == OFF else replace(s, by_length=True) for s in STRATEGIES)
MOST = 7
BUDGETS = ("all", "one each", "by class", "mixed")
"""Draft budgets of a trace: each request has all K drafts, or one, or 0, K / 2 or K by its length, or 1 to 7."""
MAX_BATCH = 32
_LEAST = 3
"""Minimum steps of a recorded rollout for use."""


@dataclass(frozen=True)
class Drafter:
    """A draft is made with probability ``match``; its tokens are accepted one by one, with ``alpha`` times ``fade``^i.

    Each request has its own ``alpha``, normally distributed around this one by ``spread``.
    """

    alpha: float
    match: float = 1.0
    fade: float = 1.0
    spread: float = 0.08

    def of(self, own: np.ndarray, num_tokens: int = MOST) -> np.ndarray:
        """Probability of each draft token, (requests, tokens), for requests at ``own`` standard deviations."""
        alpha = np.clip(self.alpha + self.spread * own, 0.02, 0.98)
        return alpha[:, None] * self.fade ** np.arange(num_tokens)

    def draw(
        self, rng: np.random.Generator, own: np.ndarray, num_tokens: int, budgets: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(whether a request has drafts, (requests); which of their tokens are accepted, (requests, tokens), 0 or 1).

        ``budgets`` (requests,): maximum drafts of each request; None: ``num_tokens``.
        """
        hits = rng.random((len(own), num_tokens)) < self.of(own, num_tokens)
        found = rng.random(len(own)) < self.match
        if budgets is not None:
            hits &= np.arange(num_tokens) < budgets[:, None]
        return found, np.cumprod(hits, axis=1) * found[:, None]


@dataclass(frozen=True)
class Shift:
    """Drafters by name before and after the shift."""

    name: str
    before: Mapping[str, Drafter]
    after: Mapping[str, Drafter]


_NGRAM = Drafter(0.8, match=0.3)
_GOOD, _STALE = Drafter(0.82, fade=0.98), Drafter(0.3, fade=0.95)
SHIFTS = (
    Shift("drafter goes stale", {"ngram": _NGRAM, "eagle": _GOOD}, {"ngram": _NGRAM, "eagle": _STALE}),
    Shift("drafter becomes good", {"ngram": _NGRAM, "eagle": _STALE}, {"ngram": _NGRAM, "eagle": _GOOD}),
    Shift(
        "responses repeat themselves",
        {"ngram": Drafter(0.6, match=0.2), "eagle": Drafter(0.6, fade=0.97)},
        {"ngram": Drafter(0.92, match=0.9), "eagle": Drafter(0.6, fade=0.97)},
    ),
)


class SyntheticTimes:
    """A GPU's cost model: a step costs the same until compute exceeds memory time; drafting costs per token.

    Noise is log-normal with rare long steps, and with slow periods.
    """

    name = "synthetic"
    max_batch = 1 << 20

    def mean(self, strategy: Strategy, batch: int, budgets: BudgetMix | None = None) -> float:
        """Seconds of a step without noise; without ``budgets`` all requests have all drafts."""
        drafts = float(strategy.num_tokens) if budgets is None else budgets.mean
        passes = strategy.num_tokens if budgets is None else len(budgets.at_least)
        tokens = batch * (1.0 + drafts)
        memory, compute = 1.0 + 0.004 * batch, 0.35 + tokens / 90.0
        target = (memory**6 + compute**6) ** (1 / 6)
        per_token, fixed = {"off": (0.0, 0.0), "ngram": (0.0, 0.03)}.get(strategy.drafter, (0.055, 0.04))
        return 0.02 * (target + fixed + per_token * passes)

    def noise(self, rng: np.random.Generator) -> Iterator[float]:
        """Factors for consecutive steps."""
        slow = False
        while True:
            slow = rng.random() < (0.98 if slow else 0.002)
            factor = float(np.exp(rng.normal(0.0, 0.12))) * (1.6 if slow else 1.0)
            if rng.random() < 0.03:
                factor *= min(10.0, 1.0 + float(rng.pareto(1.5)))
            yield factor


def recorded_files() -> list[str]:
    """Names of the shipped recordings."""
    return sorted(entry.name for entry in _recordings().iterdir() if entry.name.endswith(".json"))


def _recordings() -> Traversable:
    return resources.files("megatron_tlt.bench").joinpath("traces")


class RecordedTimes:
    """Steps of a real engine (``tools/record_step_times.py``); their noise is replayed rollout by rollout.

    The machine may have been busy with other work. So a strategy's time at a batch is the median of its least disturbed
    rollout there, and the noise is the ratio of each step to the median of its own rollout.
    """

    def __init__(self, file: str) -> None:
        recorded = json.loads(_recordings().joinpath(file).read_text("utf-8"))
        self.name = file.removesuffix(".json")
        times: dict[Strategy, dict[int, float]] = defaultdict(dict)
        self._runs: list[list[float]] = []
        for cell in recorded["steps"]:
            medians = []
            for rollout in cell["milliseconds"]:
                if len(rollout) >= _LEAST:
                    medians.append(statistics.median(rollout))
                    self._runs.append([value / medians[-1] for value in rollout])
            # with many requests some drafts are nearly always truncated: then few steps of a rollout count
            together = [value for rollout in cell["milliseconds"] for value in rollout]
            times[Strategy.parse(cell["strategy"])][int(cell["batch"])] = (
                min(medians) if medians else statistics.median(together)
            ) / 1000
        self._times = {strategy: sorted(row.items()) for strategy, row in times.items()}
        self.max_batch = max(batch for batch, _ in self._times[OFF])
        self._drafts = {
            name: [0, *sorted(s.num_tokens for s in times if s.drafter == name)] for name in {s.drafter for s in times}
        }
        self._known: dict[tuple[str, int, int], float] = {}

    def mean(self, strategy: Strategy, batch: int, budgets: BudgetMix | None = None) -> float:
        """Seconds of a typical step; linear between the recorded batches.

        With ``budgets`` it is also linear between the numbers of tokens, at the mean budget.
        """
        if budgets is None:
            return self._at(strategy.drafter, strategy.num_tokens, batch)
        drafts = self._drafts[strategy.drafter]
        seconds = [self._at(strategy.drafter if count else OFF.drafter, count, batch) for count in drafts]
        return float(np.interp(budgets.mean, drafts, seconds))

    def _at(self, drafter: str, num_tokens: int, batch: int) -> float:
        if batch > self.max_batch:
            raise ValueError(f"{self.name}: batch is {batch}; recorded are up to {self.max_batch}")
        key = drafter, num_tokens, batch
        if key not in self._known:
            batches, seconds = zip(*self._times[Strategy(drafter, num_tokens)], strict=True)
            self._known[key] = float(np.interp(batch, batches, seconds))
        return self._known[key]

    def noise(self, rng: np.random.Generator) -> Iterator[float]:
        """Factors for consecutive steps."""
        while True:
            yield from self._runs[int(rng.integers(len(self._runs)))]


Times = SyntheticTimes | RecordedTimes


def long_tailed_lengths(rng: np.random.Generator, longest: int = 768, count: int = MAX_BATCH) -> np.ndarray:
    """Tokens of ``count`` responses: log-normal with a median of 80, truncated at ``longest``."""
    lengths = np.minimum(longest, np.exp(rng.normal(np.log(80.0), 1.1, count)))
    return np.maximum(2, lengths).astype(int)


class Trace:
    """The events: step times, drafters that shift at half of the engine steps, batch size, draft budgets."""

    def __init__(self, times: Times, shift: Shift, steps: int, batch: int = MAX_BATCH, budgets: str = "all") -> None:
        self.name = f"{times.name}, {shift.name}, batch {batch}, budgets {budgets}"
        self.times, self.shift, self.steps, self.shift_at = times, shift, steps, steps // 2
        self.batch, self.budgets = batch, budgets

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return STRATEGIES if self.budgets == "all" else BY_LENGTH

    def drafters(self, step: int) -> Mapping[str, Drafter]:
        return self.shift.before if step < self.shift_at else self.shift.after

    def draw(self, rng: np.random.Generator, batch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A rollout's responses: their lengths, and what determines their budgets: a share of K, or an own bound.

        Each (requests,). With ``batch``: the last remaining, longest responses.
        """
        lengths = long_tailed_lengths(rng, count=self.batch)
        shares = np.ones(len(lengths))
        if self.budgets == "by class":
            shares = np.select([lengths > np.quantile(lengths, 0.8), lengths > np.quantile(lengths, 0.5)], [1.0, 0.5])
        elif self.budgets == "mixed":
            shares = rng.integers(1, MOST + 1, len(lengths)).astype(float)
        kept = np.argsort(lengths)[-batch:] if batch is not None else np.arange(len(lengths))
        return lengths[kept], shares[kept]

    def request_budgets(self, strategy: Strategy, shares: np.ndarray) -> np.ndarray:
        """Maximum drafts of each request, (requests,)."""
        if not strategy.by_length:
            return np.full(len(shares), strategy.num_tokens)
        if self.budgets == "by class":
            return np.floor(shares * strategy.num_tokens + 0.5).astype(int)
        return np.minimum(strategy.num_tokens, shares).astype(int)


@dataclass(frozen=True)
class Expected:
    """A strategy's expectation for the running requests: budgets, tokens per request and step, seconds of a step.

    ``length`` covers the requests that may have drafts: a rollout ends with them.
    """

    budgets: np.ndarray
    mix: BudgetMix | None
    length: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per request and second if the strategy is kept."""
        return self.length / self.seconds


class Truth:
    """Expectations for the currently running requests: the oracle's knowledge, and the reference for regret."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._of: dict[Strategy, Expected] = {}
        self.best_rate = 0.0

    def look(self, drafters: Mapping[str, Drafter], own: np.ndarray, shares: np.ndarray) -> None:
        """Updates the drafters, and each running request's deviation from them and the basis of its budget."""
        batch, times = len(own), self._trace.times
        self._of = {OFF: Expected(np.zeros(batch, dtype=int), None, 1.0, times.mean(OFF, batch))}
        for name, drafter in drafters.items():
            # tokens gained of 0, 1, ... drafts, (requests, drafts)
            gains = np.cumsum(drafter.match * np.cumprod(drafter.of(own), axis=1), axis=1)
            gains = np.concatenate([np.zeros((batch, 1)), gains], axis=1)
            for strategy in self._trace.strategies:
                if strategy.drafter == name:
                    budgets = self._trace.request_budgets(strategy, shares)
                    mix = BudgetMix.of(budgets.tolist()) if strategy.by_length else None
                    gained = gains[np.arange(batch), budgets][budgets > 0]
                    length = 1.0 + (float(gained.mean()) if len(gained) else 0.0)
                    self._of[strategy] = Expected(budgets, mix, length, times.mean(strategy, batch, mix))
        self.best_rate = max(expected.rate for expected in self._of.values())

    def of(self, strategy: Strategy) -> Expected:
        """The expectation of ``strategy`` for the requests of the last update."""
        return self._of[strategy]

    def rate(self, strategy: Strategy, batch: int) -> float:
        """The expected rate of ``strategy`` for the requests of the last update, which ``batch`` must match."""
        return self._of[strategy].rate


@dataclass
class Played:
    """Per engine step: expected seconds, the seconds that the best strategy would have saved, the strategy."""

    seconds: np.ndarray
    lost: np.ndarray
    chosen: list[str]

    def regret(self, start: int = 0, stop: int | None = None) -> float:
        """Share of the expected time of steps ``start .. stop`` lost by not choosing the best strategy."""
        return float(self.lost[start:stop].sum() / self.seconds[start:stop].sum())


def play(
    trace: Trace, controller: SpeculationController, truth: Truth, seed: int, fixed_batch: int | None = None
) -> Played:
    """Plays consecutive rollouts of long-tailed responses, or a constant batch, until the trace ends.

    A step verifies the drafts of the step before. When the strategy changes, the step gains the old one's drafts, and
    takes the mean of both strategies' times. A rollout's first step, which includes the prompts, is not counted.
    """
    rng = np.random.default_rng(seed)
    noise = trace.times.noise(rng)
    seconds, lost, chosen = np.zeros(trace.steps), np.zeros(trace.steps), []
    remaining, own, shares = np.zeros(0, dtype=int), np.zeros(0), np.zeros(0)
    verified, looked_at = OFF, 0
    for step in range(trace.steps):
        begins = not len(remaining)
        if begins:
            lengths, shares = trace.draw(rng, fixed_batch)
            remaining = np.full(len(lengths), 1 << 40) if fixed_batch else lengths
            own = rng.normal(0.0, 1.0, len(remaining))
        batch = len(remaining)
        if begins or batch != looked_at or step == trace.shift_at:
            truth.look(trace.drafters(step), own, shares)
            looked_at = batch
        if begins:
            controller.begin_rollout()
            verified = controller.choose(batch, lambda strategy: truth.of(strategy).mix)
            controller.observe(StepRecord(OFF, batch, 1.0, batch, next_strategy=verified, had_prefill=True))
        drafted = controller.choose(batch, lambda strategy: truth.of(strategy).mix)
        expected = truth.of(verified)
        mean = (expected.seconds + truth.of(drafted).seconds) / 2
        gained, drafts, accepted = np.ones(batch, dtype=int), 0, np.zeros((batch, 0), dtype=int)
        if verified != OFF:
            drafter, budgets = trace.drafters(step)[verified.drafter], expected.budgets
            found, accepted = drafter.draw(rng, own, verified.num_tokens, budgets)
            gained, drafts = gained + accepted.sum(axis=1), int(budgets[found].sum())
        controller.observe(
            StepRecord(
                verified,
                batch,
                mean * next(noise),
                int(np.minimum(gained, remaining).sum()),
                drafts,
                tuple(accepted.sum(axis=0).tolist()),
                expected.mix,
                drafted,
            )
        )
        seconds[step] = mean
        lost[step] = mean - expected.length / truth.best_rate
        chosen.append(drafted.name)
        remaining = remaining - gained
        alive = remaining > 0
        own, shares, remaining = own[alive], shares[alive], remaining[alive]
        verified = drafted
    return Played(seconds, lost, chosen)
