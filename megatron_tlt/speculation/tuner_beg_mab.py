"""Bucketed-Epsilon-Greedy: one bandit per bucket of batch sizes (TLT, adaptive rollout engine)."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_tlt.speculation.acceptance import AcceptanceLengths
from megatron_tlt.speculation.buckets import bucket_of, map_buckets, within_budget
from megatron_tlt.speculation.options import check_at_least, check_one_of, check_state
from megatron_tlt.speculation.step_times import StepTimes
from megatron_tlt.speculation.strategy import OFF, BudgetsOf, StepRecord, Strategy

_UNSURE = 0.25
"""Relative uncertainty of the plain step time above which "off" counts as untried."""
REWARDS = ("model", "per_request", "throughput")


@dataclass(frozen=True)
class BegMabOptions:
    """Options of ``BegMabTuner``.

    Attributes:
        reward: ``throughput`` is the published score, the median of tokens / duration over a bucket's window, an
            untried arm first. ``per_request`` divides it by the batch, as batches in one bucket differ. ``model`` is
            the ratio of predicted acceptance length and step time, each learned from all buckets.
        epsilon: probability that a choice explores. With ``model`` untried drafters are explored regardless of it.
        window: number of recent steps per arm and bucket (``model``: half-life of the acceptance estimate).
        explore_cost: with ``model``: share of the time that exploration may cost in the long run.
        explore_credit: with ``model``: time that exploration may cost at once, as at the start, in plain steps at a
            typical batch (the square root of the largest).
        drift: standard deviations by which the latest steps must contradict earlier ones to discard those.
        bounds: the buckets' upper bounds, the last at least the largest batch; None: one bucket for each number of
            tokens to verify.
        neighbours: number of neighbouring groups on either side that a bucket includes; None: all.
        always: every bucket has "off" and a model-free arm.
        token_budget: upper bound of batch times tokens to verify; None: no bound.
    """

    reward: str = "model"
    epsilon: float = 0.1
    window: int = 300
    explore_cost: float = 0.01
    explore_credit: float = 3.0
    drift: float = 3.5
    bounds: tuple[int, ...] | None = None
    neighbours: int | None = None
    always: bool = True
    token_budget: int | None = None

    def __post_init__(self) -> None:
        check_one_of("beg_mab", REWARDS, reward=self.reward)
        check_at_least(
            "tuner beg_mab", 0, epsilon=self.epsilon, explore_cost=self.explore_cost, neighbours=self.neighbours
        )
        check_at_least("tuner beg_mab", 0, explore_credit=self.explore_credit, drift=self.drift)
        check_at_least("tuner beg_mab", 1, window=self.window, token_budget=self.token_budget)
        if self.epsilon > 1:
            raise ValueError(f"tuner beg_mab: epsilon is {self.epsilon}; allowed: 0 to 1")
        if self.bounds is not None:
            object.__setattr__(self, "bounds", tuple(self.bounds))


PUBLISHED = {"reward": "throughput", "neighbours": 0, "always": False}
"""Options of the published code's default: each bucket contains only its own group."""


class BegMabTuner:
    """Epsilon-greedy choice inside the bucket of the batch.

    The exploration under ``reward="model"`` is not published. An arm is explored only if it could be the best one at
    the upper end of its confidence interval. Its expected cost is paid from a credit that grows with each choice. So
    clearly worse arms are explored rarely, nearly equal ones often, and the total cost is ``explore_cost``. Estimates
    age, so an arm that was bad becomes uncertain and is explored again.
    """

    def __init__(
        self, strategies: Sequence[Strategy], options: BegMabOptions | None = None, seed: int = 0, *, max_batch: int
    ) -> None:
        """For batches up to ``max_batch``; the tuner chooses "off" for larger ones.

        Raises:
            ValueError: there are no strategies, or the options do not fit them.
        """
        options = options or BegMabOptions()
        self._strategies = tuple(dict.fromkeys(strategies))
        self._options = options
        self.max_batch = max_batch
        self.buckets = map_buckets(self._strategies, max_batch, options.bounds, options.neighbours, options.always)
        self._known = {OFF, *self._strategies}
        self._seed = seed
        self._choices = 0
        self._withheld: frozenset[str] = frozenset()
        self._scores: _Scores = _Model(self) if options.reward == "model" else _Windows(self)

    @property
    def strategies(self) -> Sequence[Strategy]:
        return tuple(sorted({OFF}.union(*(bucket.arms for bucket in self.buckets))))

    @property
    def options(self) -> BegMabOptions:
        return self._options

    def arms(self, batch: int) -> list[Strategy]:
        """Arms of a batch: its bucket's arms within the token budget; "off" above the last bucket.

        Arms of withheld drafters are omitted.
        """
        bucket = bucket_of(self.buckets, batch)
        if bucket is None:
            return [OFF]
        return within_budget(self.buckets[bucket].arms, batch, self._options.token_budget, self._withheld)

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        arms = self.arms(batch)
        # a separate generator for every choice avoids generator state
        rng = random.Random(f"{self._seed} {self._choices}")
        self._choices += 1
        return self._scores.choose(arms, batch, rng, budgets) if len(arms) > 1 else arms[0]

    def observe(self, step: StepRecord) -> None:
        if step.strategy in self._known:
            self._scores.observe(step)

    def drafter_changed(self, drafter: str) -> None:
        self._scores.renew(drafter)

    def withhold(self, drafters: Collection[str]) -> None:
        self._withheld = frozenset(drafters)

    def state(self) -> dict[str, Any]:
        return {
            "tuner": "beg_mab",
            "strategies": [strategy.name for strategy in self.strategies],
            "reward": self._options.reward,
            "choices": self._choices,
            "scores": self._scores.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        check_state(state, "beg_mab", self.strategies)
        if state["reward"] != self._options.reward:
            raise ValueError(f"tuner beg_mab: the state is of reward {state['reward']}; it is {self._options.reward}")
        self._scores.load_state(state["scores"])
        self._choices = int(state["choices"])


class _Windows:
    """The published scores: medians over sliding windows, per arm and bucket."""

    def __init__(self, tuner: BegMabTuner) -> None:
        self._tuner = tuner
        self._rewards: dict[tuple[int, Strategy], list[float]] = {}

    def choose(self, arms: Sequence[Strategy], batch: int, rng: random.Random, budgets: BudgetsOf | None) -> Strategy:
        if rng.random() < self._tuner.options.epsilon:
            return rng.choice(arms)
        bucket = bucket_of(self._tuner.buckets, batch)
        return max(arms, key=lambda arm: self._score(bucket, arm))

    def _score(self, bucket: int | None, arm: Strategy) -> float:
        rewards = None if bucket is None else self._rewards.get((bucket, arm))
        return statistics.median(rewards) if rewards else math.inf

    def observe(self, step: StepRecord) -> None:
        bucket = bucket_of(self._tuner.buckets, step.batch)
        if bucket is None:
            return
        rewards = self._rewards.setdefault((bucket, step.strategy), [])
        per_request = self._tuner.options.reward == "per_request"
        rewards.append(step.num_tokens / step.duration / (step.batch if per_request else 1))
        del rewards[: -self._tuner.options.window]

    def renew(self, drafter: str) -> None:
        """Treat the drafter's arms as untried."""
        self._rewards = {key: values for key, values in self._rewards.items() if not key[1].uses([drafter])}

    def state(self) -> dict[str, Any]:
        return {
            "bounds": [bucket.upper for bucket in self._tuner.buckets],
            "rewards": [[bucket, arm.name, values] for (bucket, arm), values in self._rewards.items()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        bounds = [bucket.upper for bucket in self._tuner.buckets]
        if state.get("bounds") != bounds:
            raise ValueError(f"tuner beg_mab: the state's buckets end at {state.get('bounds')}; allowed: {bounds}")
        self._rewards = {(int(i), Strategy.parse(name)): list(values) for i, name, values in state["rewards"]}


class _Model:
    """Scores from acceptance lengths and step times, with exploration limited by a credit."""

    def __init__(self, tuner: BegMabTuner) -> None:
        self._options = tuner.options
        # plain steps just above the largest batch still show the cost of a request
        self._times = StepTimes(tuner.strategies, max_batch=2 * tuner.max_batch)
        self._lengths = AcceptanceLengths(self._options.window, self._options.drift)
        self._credit = self._options.explore_credit
        self._typical = max(1, math.isqrt(tuner.max_batch))

    def choose(self, arms: Sequence[Strategy], batch: int, rng: random.Random, budgets: BudgetsOf | None) -> Strategy:
        options = self._options
        lengths, times, most = {}, {}, {}
        for arm in arms:
            mix = budgets(arm) if budgets is not None else None
            drafted = None if mix is None else mix.drafted_only()
            lengths[arm] = self._lengths.predict(arm, drafted)
            times[arm] = self._times.predict(arm, batch, None if mix is None else mix.mean)
            most[arm] = 1.0 + (arm.num_tokens if drafted is None else drafted.mean)
        rates = {arm: lengths[arm][0] / times[arm][0] for arm in arms}
        best = max(arms, key=lambda arm: (rates[arm], arm))
        # the credit is in time: exploring at a large batch costs more than at a small one
        unit = times[best][0] / self._times.predict(OFF, self._typical)[0]
        self._credit = min(self._credit + options.explore_cost * unit, options.explore_credit)
        eager = rng.random() < options.epsilon
        found, gain, price = best, 0.0, 0.0
        for arm in arms:
            # the others' overhead is estimated relative to "off", which must be known wherever it could be the best
            untried = times[OFF][1] > _UNSURE if arm == OFF else not self._lengths.knows_drafter(arm)
            if arm == best or not (eager or untried):
                continue
            (length, error), (seconds, doubt) = lengths[arm], times[arm]
            # upper bound: two standard errors, at most all drafts
            optimistic = min(length + 2 * error, most[arm]) / (seconds * max(0.5, 1 - doubt)) / rates[best]
            # in units of a step with the best arm
            cost = seconds / times[best][0] * (1 - rates[arm] / rates[best])
            if optimistic > 1.0 and cost * unit <= self._credit and (optimistic - 1.0) / (cost + 0.05) > gain:
                found, gain, price = arm, (optimistic - 1.0) / (cost + 0.05), cost * unit
        self._credit -= price
        return found

    def observe(self, step: StepRecord) -> None:
        self._times.observe(step.strategy, step.batch, step.duration, step.mean_budget)
        self._lengths.observe(step)

    def renew(self, drafter: str) -> None:
        """Keep the drafter's step times, and discard its acceptance estimate."""
        self._lengths.renew(drafter)

    def state(self) -> dict[str, Any]:
        return {
            "times": self._times.state(),
            "lengths": self._lengths.state(),
            "credit": self._credit,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._times.load_state(state["times"])
        self._lengths.load_state(state["lengths"])
        self._credit = float(state["credit"])


_Scores = _Windows | _Model
