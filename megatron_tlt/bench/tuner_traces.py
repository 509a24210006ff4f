"""Rollouts without an engine: what a step costs and gains under each strategy, with the noise of a real one."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

import numpy as np

from megatron_tlt.speculation.controller import EngineStep, SpeculationController
from megatron_tlt.speculation.strategy import OFF, Strategy

STRATEGIES = (OFF, *(Strategy(drafter, k) for drafter in ("ngram", "eagle") for k in (1, 3, 5, 7)))
MAX_BATCH = 32
_LEAST = 3
"""Steps of a recorded rollout without which it says nothing."""


@dataclass(frozen=True)
class Drafter:
    """A draft is made with probability ``match``; its tokens are accepted one by one, with ``alpha`` times ``fade``^i.

    A request has an ``alpha`` of its own, normally distributed around this one by ``spread``.
    """

    alpha: float
    match: float = 1.0
    fade: float = 1.0
    spread: float = 0.08

    def of(self, own: np.ndarray, num_tokens: int = 7) -> np.ndarray:
        """Chance of each draft token, (requests, tokens), where requests deviate by ``own`` standard deviations."""
        alpha = np.clip(self.alpha + self.spread * own, 0.02, 0.98)
        return alpha[:, None] * self.fade ** np.arange(num_tokens)

    def draw(self, rng: np.random.Generator, own: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(whether a request has drafts, how many of their tokens are accepted), each (requests)."""
        hits = rng.random((len(own), num_tokens)) < self.of(own, num_tokens)
        found = rng.random(len(own)) < self.match
        return found, np.cumprod(hits, axis=1).sum(axis=1) * found


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
    """A GPU's shape: a step costs the same until compute outweighs memory; drafting costs by the token.

    Noise is log-normal with rare long steps, and with spells in which everything takes longer.
    """

    name = "synthetic"

    def mean(self, strategy: Strategy, batch: int) -> float:
        """Seconds of a step without noise."""
        tokens = batch * strategy.verify_tokens
        memory, compute = 1.0 + 0.004 * batch, 0.35 + tokens / 90.0
        target = (memory**6 + compute**6) ** (1 / 6)
        per_token, fixed = {"off": (0.0, 0.0), "ngram": (0.0, 0.03)}.get(strategy.drafter, (0.055, 0.04))
        return 0.02 * (target + fixed + per_token * strategy.num_tokens)

    def noise(self, rng: np.random.Generator) -> Iterator[float]:
        """Factors for one step after another."""
        slow = False
        while True:
            slow = rng.random() < (0.98 if slow else 0.002)
            factor = float(np.exp(rng.normal(0.0, 0.12))) * (1.6 if slow else 1.0)
            if rng.random() < 0.03:
                factor *= min(10.0, 1.0 + float(rng.pareto(1.5)))
            yield factor


def recorded_files() -> list[str]:
    """Names of the recordings that are shipped."""
    return sorted(entry.name for entry in _recordings().iterdir() if entry.name.endswith(".json"))


def _recordings() -> Traversable:
    return resources.files("megatron_tlt.bench").joinpath("traces")


class RecordedTimes:
    """Steps of a real engine (``tools/record_step_times.py``), their noise replayed rollout by rollout.

    The machine may have been busy with other things: what is taken for the time of a strategy at a batch is the median
    of its least disturbed rollout there, and the noise is what steps took over the median of their own rollout.
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
            times[Strategy.parse(cell["strategy"])][int(cell["batch"])] = min(medians) / 1000
        self._times = {strategy: sorted(row.items()) for strategy, row in times.items()}

    def mean(self, strategy: Strategy, batch: int) -> float:
        """Seconds of a typical step; linear between the batches that were recorded."""
        batches, seconds = zip(*self._times[strategy], strict=True)
        return float(np.interp(batch, batches, seconds))

    def noise(self, rng: np.random.Generator) -> Iterator[float]:
        """Factors for one step after another."""
        while True:
            yield from self._runs[int(rng.integers(len(self._runs)))]


Times = SyntheticTimes | RecordedTimes


def long_tailed_lengths(rng: np.random.Generator, longest: int = 768) -> np.ndarray:
    """Tokens of ``MAX_BATCH`` responses: log-normal with a median of 80, cut off at ``longest``."""
    lengths = np.minimum(longest, np.exp(rng.normal(np.log(80.0), 1.1, MAX_BATCH)))
    return np.maximum(2, lengths).astype(int)


class Trace:
    """What happens: step times, and drafters that shift at half of the engine steps."""

    def __init__(self, times: Times, shift: Shift, steps: int) -> None:
        self.name = f"{times.name}, {shift.name}"
        self.times, self.shift, self.steps, self.shift_at = times, shift, steps, steps // 2

    def drafters(self, step: int) -> Mapping[str, Drafter]:
        return self.shift.before if step < self.shift_at else self.shift.after


class Truth:
    """What can be expected of the requests that run at the moment: an oracle's knowledge, and the measure of regret."""

    def __init__(self, trace: Trace) -> None:
        self._times = trace.times
        self._lengths: dict[Strategy, float] = {}
        self._best: float | None = None

    def look(self, drafters: Mapping[str, Drafter], own: np.ndarray) -> None:
        """Take in the drafters and the running requests' deviations from them, in standard deviations."""
        self._best = None
        self._lengths = {OFF: 1.0}
        for name, drafter in drafters.items():
            reached = drafter.match * np.cumprod(drafter.of(own), axis=1).mean(axis=0).cumsum()
            for strategy in STRATEGIES:
                if strategy.drafter == name:
                    self._lengths[strategy] = 1.0 + float(reached[strategy.num_tokens - 1])

    def length(self, strategy: Strategy) -> float:
        """Expected tokens per request and step."""
        return self._lengths[strategy]

    def rate(self, strategy: Strategy, batch: int) -> float:
        """Expected tokens per request and second where the strategy stays."""
        return self._lengths[strategy] / self._times.mean(strategy, batch)

    def best_rate(self, batch: int) -> float:
        """The best strategy's rate, for the batch last looked at."""
        if self._best is None:
            self._best = max(self.rate(strategy, batch) for strategy in STRATEGIES)
        return self._best


@dataclass
class Played:
    """Per engine step: expected seconds, those of them that the best strategy would have saved, the strategy."""

    seconds: np.ndarray
    lost: np.ndarray
    chosen: list[str]

    def regret(self, start: int = 0, stop: int | None = None) -> float:
        """Share of the expected time of steps ``start .. stop`` that went into not choosing the best strategy."""
        return float(self.lost[start:stop].sum() / self.seconds[start:stop].sum())


def play(
    trace: Trace, controller: SpeculationController, truth: Truth, seed: int, fixed_batch: int | None = None
) -> Played:
    """Rollouts of 32 long-tailed responses one after another, or a batch that stays, until the trace's steps are over.

    A step verifies the drafts of the step before: where the strategy changes, it gains what the old one drafted, and
    takes the mean of both strategies' times. A rollout's first step, with the prompts in it, is not counted.
    """
    rng = np.random.default_rng(seed)
    noise = trace.times.noise(rng)
    seconds, lost, chosen = np.zeros(trace.steps), np.zeros(trace.steps), []
    remaining, own = np.zeros(0, dtype=int), np.zeros(0)
    verified, looked_at = OFF, 0
    for step in range(trace.steps):
        begins = not len(remaining)
        if begins:
            remaining = np.full(fixed_batch, 1 << 40) if fixed_batch else long_tailed_lengths(rng)
            own = rng.normal(0.0, 1.0, len(remaining))
        batch = len(remaining)
        if begins or batch != looked_at or step == trace.shift_at:
            truth.look(trace.drafters(step), own)
            looked_at = batch
        if begins:
            controller.begin_rollout()
            verified = controller.next(batch)
            controller.observe(EngineStep(OFF, verified, batch, 1.0, batch, had_prefill=True))
        drafted = controller.next(batch)
        mean = (trace.times.mean(verified, batch) + trace.times.mean(drafted, batch)) / 2
        gained, drafts = np.ones(batch, dtype=int), 0
        if verified != OFF:
            found, accepted = trace.drafters(step)[verified.drafter].draw(rng, own, verified.num_tokens)
            gained, drafts = gained + accepted, int(found.sum()) * verified.num_tokens
        total = int(np.minimum(gained, remaining).sum())
        controller.observe(
            EngineStep(verified, drafted, batch, mean * next(noise), total, drafts, int(gained.sum()) - batch)
        )
        seconds[step] = mean
        lost[step] = mean - truth.length(verified) / truth.best_rate(batch)
        chosen.append(drafted.name)
        remaining = remaining - gained
        own, remaining = own[remaining > 0], remaining[remaining > 0]
        verified = drafted
    return Played(seconds, lost, chosen)
