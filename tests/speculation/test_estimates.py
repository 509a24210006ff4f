"""Estimates of step times and of acceptance."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.speculation.acceptance import AcceptanceLengths, implied_rate
from megatron_tlt.speculation.step_times import StepTimes
from megatron_tlt.speculation.strategy import OFF, BudgetMix, StepRecord, Strategy

STRATEGIES = [OFF, *(Strategy(drafter, k) for drafter in ("ngram", "eagle") for k in (1, 3, 5, 7))]


def true_seconds(strategy: Strategy, batch: int) -> float:
    drafting = {"off": 0.0, "ngram": 0.1, "eagle": 0.2 + 0.15 * strategy.num_tokens}[strategy.drafter]
    return 0.004 * (1 + 0.02 * batch + 0.015 * batch * strategy.num_tokens + drafting)


def expected_length(rates: Sequence[float], budgets: Iterable[int]) -> float:
    """Tokens per request if draft token j is accepted with ``rates[j]`` given that those before it were."""
    budgets = list(budgets)
    return 1 + sum(sum(math.prod(rates[: j + 1]) for j in range(budget)) for budget in budgets) / len(budgets)


def draw(rng: random.Random, rates: Sequence[float], budgets: Iterable[int]) -> list[int]:
    """Draw the accepted tokens of each request."""
    accepted = []
    for budget in budgets:
        accepted.append(next((j for j in range(budget) if rng.random() >= rates[j]), budget))
    return accepted


def observation(strategy: Strategy, budgets: Sequence[int], accepted: Sequence[int]) -> StepRecord:
    batch = len(budgets)
    per_position = tuple(sum(count > j for count in accepted) for j in range(strategy.num_tokens))
    return StepRecord(strategy, batch, 1.0, batch + sum(accepted), sum(budgets), per_position, BudgetMix.of(budgets))


def chain(rng: random.Random, alpha: float, strategy: Strategy, batch: int) -> StepRecord:
    budgets = [strategy.num_tokens] * batch
    return observation(strategy, budgets, draw(rng, [alpha] * strategy.num_tokens, budgets))


def chain_length(alpha: float, num_tokens: int) -> float:
    return expected_length([alpha] * num_tokens, [num_tokens])


@given(st.lists(st.integers(0, 9), max_size=30))
def test_a_mix_counts_requests_by_their_budgets(budgets: list[int]) -> None:
    mix = BudgetMix.of(budgets)
    assert mix.requests == len(budgets) and len(mix.at_least) == max(budgets, default=0)
    assert mix.at_least == tuple(sum(budget > j for budget in budgets) for j in range(len(mix.at_least)))
    assert mix.mean == pytest.approx(sum(budgets) / max(1, len(budgets)))
    assert mix.drafted_only() == BudgetMix.of([budget for budget in budgets if budget])


def test_with_budgets_of_one_no_request_gains_more_than_one_token() -> None:
    lengths, arm, rng = AcceptanceLengths(), Strategy("suffix", 7, by_length=True), random.Random(0)
    for _ in range(400):
        lengths.observe(observation(arm, [1] * 8, draw(rng, [0.7], [1] * 8)))
    assert lengths.predict(arm, BudgetMix.of([1] * 8))[0] == pytest.approx(1.7, abs=0.03)


@settings(max_examples=60)
@given(st.floats(0.02, 0.98), st.lists(st.integers(1, 7), min_size=1, max_size=24), st.data())
def test_a_prediction_is_the_expectation_of_any_budgets(alpha: float, seen: list[int], data: st.DataObject) -> None:
    """Independent acceptance; predicted budgets differ from the observed ones, which include some as large."""
    asked = data.draw(st.lists(st.integers(0, max(seen)), min_size=1, max_size=24))
    lengths, arm = AcceptanceLengths(half_life=1e6), Strategy("suffix", 7, by_length=True)
    at_least = BudgetMix.of(seen).at_least
    scale = 10**9  # with this many equal requests, acceptance equals its expectation except for rounding
    per_position = tuple(round(scale * count * alpha ** (j + 1)) for j, count in enumerate(at_least))
    step = StepRecord(
        arm,
        scale * len(seen),
        1.0,
        scale * len(seen) + sum(per_position),
        scale * sum(seen),
        per_position,
        BudgetMix(scale * len(seen), tuple(scale * count for count in at_least)),
    )
    for _ in range(400):
        lengths.observe(step)
    assert lengths.predict(arm, BudgetMix.of(asked))[0] == pytest.approx(expected_length([alpha] * 7, asked), abs=0.02)


@settings(max_examples=30)
@given(
    st.lists(st.floats(0.1, 0.95), min_size=5, max_size=5),
    st.lists(st.integers(0, 5), min_size=8, max_size=8),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(0, 99),
)
def test_a_prediction_equals_simulation(rates: list[float], seen: list[int], asked: list[int], seed: int) -> None:
    """Each position has its own rate; simulated steps have mixed budgets, one request always the largest."""
    lengths, arm, rng = AcceptanceLengths(half_life=1e6, drift=1e9), Strategy("eagle", 5, by_length=True), None
    rng = random.Random(seed)
    budgets = [*seen, 5]
    for _ in range(1500):
        lengths.observe(observation(arm, budgets, draw(rng, rates, budgets)))
    predicted, error = lengths.predict(arm, BudgetMix.of(asked))
    assert abs(predicted - expected_length(rates, asked)) < max(0.1, 5 * error)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.booleans()), max_size=12), st.data())
def test_no_prediction_is_more_than_all_drafts(steps: list[tuple[list[int], bool]], data: st.DataObject) -> None:
    """For any observations, also if the strategies' budgets differ from step to step."""
    lengths = AcceptanceLengths()
    for budgets, by_length in steps:
        arm = Strategy("suffix", 6, by_length)
        accepted = [data.draw(st.integers(0, budget)) for budget in budgets]
        lengths.observe(observation(arm, budgets, accepted))
    asked = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    mix = BudgetMix.of(asked)
    predicted, error = lengths.predict(Strategy("suffix", 6, by_length=True), mix)
    assert 1.0 <= predicted <= 1.0 + mix.mean + 1e-9 and error >= 0
    assert lengths.predict(Strategy("suffix", 6))[0] <= 7.0


def test_a_few_strategies_predict_the_step_times_of_the_others() -> None:
    times = StepTimes(STRATEGIES, 72)
    rng = random.Random(1)
    seen = [OFF, Strategy("ngram", 3), Strategy("eagle", 1), Strategy("eagle", 3)]
    for batch in (32, 16, 8, 3, 1):
        for strategy in seen:
            for _ in range(4):
                times.observe(strategy, batch, true_seconds(strategy, batch) * rng.lognormvariate(0, 0.05))
    for strategy in STRATEGIES:
        for batch in (1, 5, 20, 32):
            seconds, doubt = times.predict(strategy, batch)
            assert seconds == pytest.approx(true_seconds(strategy, batch), rel=0.2)
            assert (doubt < 0.2) == (strategy in seen)


def test_a_strategy_with_its_own_step_time_is_learned() -> None:
    times, odd = StepTimes(STRATEGIES, 72), Strategy("eagle", 5)
    for _ in range(20):
        for strategy in STRATEGIES:
            times.observe(strategy, 4, true_seconds(strategy, 4) * (1.8 if strategy == odd else 1.0))
    for strategy in STRATEGIES:
        factor = 1.8 if strategy == odd else 1.0
        assert times.predict(strategy, 4)[0] == pytest.approx(factor * true_seconds(strategy, 4), rel=0.1)


def test_a_slowdown_is_not_attributed_to_the_strategy_tried_in_it() -> None:
    times, tried = StepTimes(STRATEGIES, 72), Strategy("ngram", 3)
    for _ in range(40):
        times.observe(OFF, 4, true_seconds(OFF, 4))
    for _ in range(8):
        times.observe(OFF, 4, 2 * true_seconds(OFF, 4))
    for _ in range(6):
        times.observe(tried, 4, 2 * true_seconds(tried, 4))
    assert times.predict(tried, 4)[0] == pytest.approx(true_seconds(tried, 4), rel=0.25)
    assert times.predict(OFF, 4)[0] == pytest.approx(true_seconds(OFF, 4), rel=0.05)


def test_a_strategy_that_stays_slower_is_learned_eventually() -> None:
    times = StepTimes(STRATEGIES, 72)
    for factor in (1.0, 2.0):
        for _ in range(600):
            times.observe(OFF, 4, factor * true_seconds(OFF, 4))
    assert times.predict(OFF, 4)[0] > 1.6 * true_seconds(OFF, 4)


def test_batches_above_the_largest_are_not_kept_and_large_ones_share_cells() -> None:
    times = StepTimes(STRATEGIES, max_batch=256)
    for batch in range(1, 2000):
        times.observe(OFF, batch, 0.01 + 0.0001 * batch)
    assert len(times) == 32 + 3 * 16
    for batch in (1, 33, 63, 100, 201, 256):
        assert times.predict(OFF, batch)[0] == pytest.approx(0.01 + 0.0001 * batch, rel=0.05)


@pytest.mark.parametrize(("before", "after"), [(64, 16), (64, 520), (520, 72)])
def test_step_times_of_another_range_can_be_loaded(before: int, after: int) -> None:
    times, other = StepTimes(STRATEGIES, max_batch=before), StepTimes(STRATEGIES, max_batch=after)
    for batch in range(1, before + 1):
        times.observe(OFF, batch, 0.01 + 0.0001 * batch)
    other.load_state(json.loads(json.dumps(times.state())))
    for batch in {1, 8, 16, min(before, after)}:
        assert other.predict(OFF, batch)[0] == pytest.approx(times.predict(OFF, batch)[0], rel=0.1)
    other.observe(OFF, after, 0.01 + 0.0001 * after)


def test_step_times_of_an_earlier_release_can_be_loaded() -> None:
    """Batches up to 64, one cell per batch, without draft budgets."""
    cells = [
        [strategy.name, batch, [true_seconds(strategy, batch)] * 6] for strategy in STRATEGIES for batch in range(1, 65)
    ]
    times = StepTimes(STRATEGIES, max_batch=260)
    weights = [0.004, 0.00008, 0.00006, 0.0008, 0.0006, 0.0004, 0.0]
    times.load_state({"cells": cells, "weights": weights, "since_fit": 0, "machine_slowdown": []})
    assert len(times) == 48 * len(STRATEGIES)
    for strategy in STRATEGIES:
        for batch in (1, 33, 64):
            assert times.predict(strategy, batch)[0] == pytest.approx(true_seconds(strategy, batch), rel=0.05)
    times.observe(OFF, 200, true_seconds(OFF, 200))


def test_a_step_with_fewer_drafts_takes_less() -> None:
    times, arm = StepTimes(STRATEGIES, 72), Strategy("ngram", 7, by_length=True)
    for budget in (1, 4, 7):
        for batch in (8, 32):
            for _ in range(12):
                seconds = true_seconds(OFF, batch) + 0.004 * 0.015 * batch * budget
                times.observe(OFF, batch, true_seconds(OFF, batch))
                times.observe(arm, batch, seconds, float(budget))
    few, many = times.predict(arm, 32, 1.0)[0], times.predict(arm, 32, 7.0)[0]
    assert few < 0.8 * many and times.predict(arm, 32)[0] == many


def test_one_strategy_predicts_the_others_of_its_drafter() -> None:
    lengths, rng = AcceptanceLengths(), random.Random(0)
    for _ in range(100):
        lengths.observe(chain(rng, 0.7, Strategy("eagle", 3), 8))
    assert lengths.predict(Strategy("eagle", 3))[0] == pytest.approx(chain_length(0.7, 3), rel=0.05)
    assert lengths.predict(Strategy("eagle", 7))[0] == pytest.approx(chain_length(0.7, 7), rel=0.1)
    assert lengths.knows_drafter(Strategy("eagle", 1)) and not lengths.knows_drafter(Strategy("ngram", 1))
    assert lengths.predict(OFF) == (1.0, 0.0)


def test_a_bounded_strategy_starts_from_its_drafter_and_is_learned_separately() -> None:
    """It may make half of the drafts until its own steps show otherwise; it does not start as a bargain."""
    head, sure = Strategy("eagle", 5), Strategy("eagle", 5, least_percent=50)
    times = StepTimes([OFF, head, sure], max_batch=64)
    for batch in (1, 8, 32):
        for strategy in (OFF, head):
            for _ in range(8):
                times.observe(strategy, batch, true_seconds(strategy, batch))
    for batch in (8, 32):
        (plain, _), (some, _), (most, _) = (times.predict(one, batch) for one in (OFF, sure, head))
        assert plain + 0.3 * (most - plain) < some < most
    lengths = AcceptanceLengths()
    for _ in range(40):
        lengths.observe(observation(head, [5] * 4, [0] * 4))
        lengths.observe(observation(sure, [5] * 4, [3] * 4))
    assert lengths.predict(head)[0] < 1.2 and lengths.predict(sure)[0] > 3.0
    pair = Strategy("suffix+eagle", 5)
    assert lengths.knows_drafter(sure) and not lengths.knows_drafter(pair)
    lengths.renew("eagle")
    assert lengths.predict(sure)[1] > 0.1, "a bound is its drafter's too"


def test_rare_drafts_are_not_taken_for_short_chains() -> None:
    lengths, rng = AcceptanceLengths(), random.Random(0)
    for i in range(300):
        step = chain(rng, 0.9, Strategy("ngram", 3), 4)
        lengths.observe(step if i % 4 == 0 else StepRecord(Strategy("ngram", 3), 4, 1.0, 4))
    expected = 0.75 + 0.25 * chain_length(0.9, 7)
    assert lengths.predict(Strategy("ngram", 7))[0] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("found", [1.0, 0.5])
def test_requests_without_drafts_do_not_affect_acceptance(found: float) -> None:
    lengths, rng, arm = AcceptanceLengths(), random.Random(0), Strategy("suffix", 4, by_length=True)
    for batch in (64, 4):
        budgets = [4] * 4 + [0] * (batch - 4)
        for _ in range(200):
            accepted = draw(rng, [0.8] * 4, budgets[: round(4 * found)])
            lengths.observe(observation(arm, budgets, accepted))
        gain = found * (chain_length(0.8, 4) - 1)
        mix = BudgetMix.of(budgets)
        assert lengths.predict(arm, mix.drafted_only())[0] == pytest.approx(1 + gain, rel=0.1), batch
        assert lengths.predict(arm, mix)[0] == pytest.approx(1 + gain * 4 / batch, rel=0.1), batch
    before = lengths.predict(arm)[0]
    lengths.observe(observation(arm, [0] * 8, [0] * 8))
    assert lengths.predict(arm)[0] == pytest.approx(before, rel=0.01)
    assert lengths.predict(arm, BudgetMix.of([0] * 8)) == (1.0, 0.0)


def test_only_a_drafter_that_changes_is_detected_as_drift() -> None:
    lengths, rng = AcceptanceLengths(), random.Random(3)
    strategy, other = Strategy("eagle", 5), Strategy("eagle", 3)
    for _ in range(50):
        lengths.observe(chain(rng, 0.8, other, 1))
    for _ in range(800):
        lengths.observe(chain(rng, 0.8, strategy, 1))
    assert lengths.drifts <= 1, "of 800 steps without a change"
    before = lengths.drifts
    noticed = next(i for i in range(100) if lengths.observe(chain(rng, 0.3, strategy, 1)))
    assert noticed < 60 and lengths.drifts == before + 1
    for _ in range(20):
        lengths.observe(chain(rng, 0.3, strategy, 1))
    assert lengths.predict(other)[0] < 1.9, "its other strategies are not believed any more either"


def test_a_new_version_is_uncertain_and_no_drift() -> None:
    lengths, arm = AcceptanceLengths(), Strategy("eagle", 3)
    for _ in range(200):
        lengths.observe(StepRecord(arm, 4, 0.01, 10, 12, (3, 2, 1)))
    before, sure = lengths.predict(arm)
    lengths.renew("eagle")
    after, unsure = lengths.predict(arm)
    assert after == pytest.approx(before, rel=0.05) and unsure > 2 * sure
    for _ in range(12):
        assert not lengths.observe(StepRecord(arm, 4, 0.01, 6, 12, (2, 0, 0)))
    assert lengths.predict(arm)[0] < (before + 1.5) / 2
    lengths.renew("suffix")
    assert lengths.predict(arm)[1] < unsure


def test_unused_strategies_become_uncertain() -> None:
    lengths, rng = AcceptanceLengths(), random.Random(0)
    for _ in range(100):
        lengths.observe(chain(rng, 0.6, Strategy("ngram", 3), 4))
    sure = lengths.predict(Strategy("ngram", 3))[1]
    for _ in range(300):
        lengths.observe(chain(rng, 0.6, Strategy("eagle", 3), 4))
    assert lengths.predict(Strategy("ngram", 3))[1] > 3 * sure


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(0, 120))
def test_loaded_states_continue_identically(seed: int, cut: int) -> None:
    rng = random.Random(seed)
    steps = []
    for _ in range(160):
        strategy, batch = rng.choice(STRATEGIES), rng.randint(1, 32)
        observed = chain(rng, 0.6, strategy, batch)
        steps.append((observed, true_seconds(strategy, batch) * rng.lognormvariate(0, 0.2)))
    times, lengths = StepTimes(STRATEGIES, 72), AcceptanceLengths()
    resumed_times, resumed_lengths = StepTimes(STRATEGIES, 72), AcceptanceLengths()
    for i, (step, seconds) in enumerate(steps):
        if i == cut:
            resumed_times.load_state(json.loads(json.dumps(times.state())))
            resumed_lengths.load_state(json.loads(json.dumps(lengths.state())))
        times.observe(step.strategy, step.batch, seconds)
        lengths.observe(step)
        if i >= cut:
            resumed_times.observe(step.strategy, step.batch, seconds)
            resumed_lengths.observe(step)
    for strategy in STRATEGIES:
        assert lengths.predict(strategy) == resumed_lengths.predict(strategy)
        assert times.predict(strategy, 6) == resumed_times.predict(strategy, 6)


@given(st.floats(0.02, 0.98), st.integers(1, 12))
def test_a_chains_rate_is_recovered(alpha: float, num_tokens: int) -> None:
    assert implied_rate(chain_length(alpha, num_tokens) - 1, num_tokens) == pytest.approx(alpha, abs=1e-3)


def test_acceptance_of_an_earlier_release_can_be_loaded() -> None:
    """Sums by strategy; those by length are in units of full budgets, since there were no budgets."""

    def sums(samples: float, drafted: float, accepted: float) -> dict[str, float]:
        return {"samples": samples, "drafted": drafted, "accepted": accepted}

    eagle, ngram = sums(200.0, 200.0, 200.0 * (chain_length(0.7, 3) - 1)), sums(90.0, 30.0, 30.0 * 0.8)
    wrong = sums(300.0, 300.0, 300.0 * 4.9)
    written = {
        "clock": 500,
        "drifts": 1,
        "strategies": [
            ["eagle-3", 500, eagle, eagle],
            ["ngram-1", 500, ngram, ngram],
            ["suffix-7-by-length", 500, wrong, wrong],
        ],
    }
    lengths = AcceptanceLengths()
    lengths.load_state(written)
    assert lengths.predict(Strategy("eagle", 7))[0] == pytest.approx(chain_length(0.7, 7), rel=0.05)
    assert lengths.predict(Strategy("ngram", 1))[0] == pytest.approx(1 + 0.8 / 3, rel=0.02)
    assert not lengths.knows_drafter(Strategy("suffix", 7))
    assert lengths.drifts == 1 and not lengths.observe(chain(random.Random(0), 0.7, Strategy("eagle", 3), 8))
