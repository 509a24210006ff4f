"""What is learnt of step times and of acceptance."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.speculation.acceptance import AcceptanceLengths, chain_moments, implied_alpha
from megatron_tlt.speculation.step_times import StepTimes
from megatron_tlt.speculation.strategy import OFF, StepObservation, Strategy

STRATEGIES = [OFF, *(Strategy(drafter, k) for drafter in ("ngram", "eagle") for k in (1, 3, 5, 7))]


def true_seconds(strategy: Strategy, batch: int) -> float:
    drafting = {"off": 0.0, "ngram": 0.1, "eagle": 0.2 + 0.15 * strategy.num_tokens}[strategy.drafter]
    return 0.004 * (1 + 0.02 * batch + 0.015 * batch * strategy.num_tokens + drafting)


def chain(rng: random.Random, alpha: float, strategy: Strategy, batch: int) -> StepObservation:
    accepted = 0
    for _ in range(batch):
        for _ in range(strategy.num_tokens):
            if rng.random() >= alpha:
                break
            accepted += 1
    return StepObservation(strategy, batch, 1.0, batch + accepted, batch * strategy.num_tokens, accepted)


@settings(deadline=None)
@given(st.floats(0.02, 0.98), st.integers(1, 12))
def test_alpha_comes_back(alpha: float, num_tokens: int) -> None:
    mean, square = chain_moments(alpha, num_tokens)
    assert implied_alpha(mean, num_tokens) == pytest.approx(alpha, abs=1e-3)
    assert square >= mean**2


def test_moments_are_those_of_a_chain() -> None:
    rng = random.Random(0)
    drawn = [chain(rng, 0.7, Strategy("eagle", 4), 1).num_accepted_tokens for _ in range(20_000)]
    mean, square = chain_moments(0.7, 4)
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)
    assert sum(n * n for n in drawn) / len(drawn) == pytest.approx(square, rel=0.03)


def test_few_strategies_say_what_the_others_take() -> None:
    times = StepTimes(STRATEGIES)
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


def test_a_strategy_that_is_its_own_kind_is_learnt() -> None:
    times, odd = StepTimes(STRATEGIES), Strategy("eagle", 5)
    for _ in range(20):
        for strategy in STRATEGIES:
            times.observe(strategy, 4, true_seconds(strategy, 4) * (1.8 if strategy == odd else 1.0))
    for strategy in STRATEGIES:
        factor = 1.8 if strategy == odd else 1.0
        assert times.predict(strategy, 4)[0] == pytest.approx(factor * true_seconds(strategy, 4), rel=0.1)


def test_a_slow_spell_is_not_put_down_to_the_strategy_tried_in_it() -> None:
    times, tried = StepTimes(STRATEGIES), Strategy("ngram", 3)
    for _ in range(40):
        times.observe(OFF, 4, true_seconds(OFF, 4))
    for _ in range(8):
        times.observe(OFF, 4, 2 * true_seconds(OFF, 4))
    for _ in range(6):
        times.observe(tried, 4, 2 * true_seconds(tried, 4))
    assert times.predict(tried, 4)[0] == pytest.approx(true_seconds(tried, 4), rel=0.25)
    assert times.predict(OFF, 4)[0] == pytest.approx(true_seconds(OFF, 4), rel=0.05)


def test_a_strategy_that_stays_slower_is_believed_in_the_end() -> None:
    times = StepTimes(STRATEGIES)
    for factor in (1.0, 2.0):
        for _ in range(600):
            times.observe(OFF, 4, factor * true_seconds(OFF, 4))
    assert times.predict(OFF, 4)[0] > 1.6 * true_seconds(OFF, 4)


def test_batches_far_above_the_gate_are_not_kept() -> None:
    times = StepTimes(STRATEGIES, max_batch=64)
    for batch in range(1, 300):
        times.observe(OFF, batch, 1.0)
    assert len(times) == 64
    narrower = StepTimes(STRATEGIES, max_batch=16)
    narrower.load_state(times.state())
    assert len(narrower) == 16 and narrower.predict(OFF, 8)[0] == pytest.approx(times.predict(OFF, 8)[0], rel=0.05)


def test_one_strategy_says_what_its_drafter_does() -> None:
    lengths, rng = AcceptanceLengths(), random.Random(0)
    for _ in range(100):
        lengths.observe(chain(rng, 0.7, Strategy("eagle", 3), 8))
    assert lengths.predict(Strategy("eagle", 3))[0] == pytest.approx(1 + chain_moments(0.7, 3)[0], rel=0.05)
    assert lengths.predict(Strategy("eagle", 7))[0] == pytest.approx(1 + chain_moments(0.7, 7)[0], rel=0.1)
    assert lengths.knows_drafter(Strategy("eagle", 1)) and not lengths.knows_drafter(Strategy("ngram", 1))
    assert lengths.predict(OFF) == (1.0, 0.0)


def test_drafts_that_are_seldom_found_are_not_short_chains() -> None:
    lengths, rng = AcceptanceLengths(), random.Random(0)
    for i in range(300):
        step = chain(rng, 0.9, Strategy("ngram", 3), 4)
        lengths.observe(step if i % 4 == 0 else StepObservation(Strategy("ngram", 3), 4, 1.0, 4))
    expected = 1 + 0.25 * chain_moments(0.9, 7)[0]
    assert lengths.predict(Strategy("ngram", 7))[0] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("found", [1.0, 0.5])
def test_by_length_the_gain_is_that_of_the_requests_that_may_have_drafts(found: float) -> None:
    lengths, rng, arm = AcceptanceLengths(), random.Random(0), Strategy("suffix", 4, by_length=True)
    for batch in (64, 4):
        for _ in range(200):  # 4 of them may have 4 drafts each
            accepted = [next((n for n in range(4) if rng.random() > 0.8), 4) for _ in range(round(4 * found))]
            step = StepObservation(arm, batch, 1.0, batch + sum(accepted), 4 * len(accepted), sum(accepted), 16)
            lengths.observe(step)
        assert lengths.predict(arm)[0] == pytest.approx(1 + found * chain_moments(0.8, 4)[0], rel=0.1), batch
    lengths.observe(StepObservation(arm, 8, 1.0, 8))  # none may
    assert lengths.predict(arm)[0] == pytest.approx(1 + found * chain_moments(0.8, 4)[0], rel=0.1)


def test_a_drafter_that_changes_is_noticed_and_one_that_does_not_is_not() -> None:
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


def test_of_a_new_version_little_is_known_and_no_drift_is_told() -> None:
    lengths, arm = AcceptanceLengths(), Strategy("eagle", 3)
    for _ in range(200):
        lengths.observe(StepObservation(arm, 4, 0.01, 12, 12, 8))
    before, sure = lengths.predict(arm)
    lengths.renew("eagle")
    after, unsure = lengths.predict(arm)
    assert after == pytest.approx(before, rel=0.05) and unsure > 2 * sure
    for _ in range(12):
        assert not lengths.observe(StepObservation(arm, 4, 0.01, 6, 12, 2))
    assert lengths.predict(arm)[0] < (before + 1.5) / 2
    lengths.renew("suffix")
    assert lengths.predict(arm)[1] < unsure


def test_what_was_not_used_for_long_becomes_uncertain() -> None:
    lengths, rng = AcceptanceLengths(), random.Random(0)
    for _ in range(100):
        lengths.observe(chain(rng, 0.6, Strategy("ngram", 3), 4))
    sure = lengths.predict(Strategy("ngram", 3))[1]
    for _ in range(300):
        lengths.observe(chain(rng, 0.6, Strategy("eagle", 3), 4))
    assert lengths.predict(Strategy("ngram", 3))[1] > 3 * sure


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(0, 120))
def test_states_go_on_as_if_nothing_had_happened(seed: int, cut: int) -> None:
    rng = random.Random(seed)
    steps = []
    for _ in range(160):
        strategy, batch = rng.choice(STRATEGIES), rng.randint(1, 32)
        observed = chain(rng, 0.6, strategy, batch)
        steps.append((observed, true_seconds(strategy, batch) * rng.lognormvariate(0, 0.2)))
    times, lengths = StepTimes(STRATEGIES), AcceptanceLengths()
    resumed_times, resumed_lengths = StepTimes(STRATEGIES), AcceptanceLengths()
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
