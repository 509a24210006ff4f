"""Closed-form budgets against numerical optimisers, and the fits against the parameters of their data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from megatron_tlt.speculation.budget import (
    AcceptanceCurve,
    StepCosts,
    fit_acceptance,
    fit_step_costs,
    optimal_budgets,
)

CURVES = st.builds(AcceptanceCurve, st.floats(0.05, 5.0), st.one_of(st.just(1.0), st.floats(0.05, 1.0)))
REQUESTS = st.lists(st.tuples(st.floats(1.0, 1e5), CURVES), min_size=1, max_size=12)
COSTS = st.builds(StepCosts, st.just(1.0), st.floats(1e-4, 1.0))


def needed(passes: float, length: float, curve: AcceptanceCurve) -> float:
    """The least budget that finishes a response in ``passes`` passes, by inverting A(p) with a bisection."""
    if length <= passes:
        return 0.0
    if length - curve.k * length >= passes:
        return math.inf
    low, high = 0.0, 1.0
    while length - curve.accepted(high, length) > passes:
        high *= 2
        if high > 1e12:
            return math.inf
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if length - curve.accepted(middle, length) > passes else (low, middle)
    return high


def cost(passes: float, requests: Sequence[tuple[float, AcceptanceCurve]], costs: StepCosts) -> float:
    return costs.base * passes + costs.token * sum(needed(passes, *request) for request in requests)


@settings(max_examples=40)
@given(REQUESTS, COSTS)
def test_the_optimal_number_of_passes_has_the_least_cost(
    requests: list[tuple[float, AcceptanceCurve]], costs: StepCosts
) -> None:
    lengths, curves = [length for length, _ in requests], [curve for _, curve in requests]
    optimum = optimal_budgets(lengths, curves, costs)
    found = costs.base * optimum.passes + costs.token * sum(optimum.tokens)
    lower = max(length * (1 - curve.k) for length, curve in requests)
    best = minimize_scalar(
        cost, bounds=(lower, max(lengths)), args=(requests, costs), method="bounded", options={"xatol": 1e-9}
    )
    grid = [lower + (max(lengths) - lower) * i / 50 for i in range(1, 51)]
    least = min(best.fun, *(cost(passes, requests, costs) for passes in grid))
    assert found <= least * (1 + 1e-6)
    assert lower <= optimum.passes <= max(lengths) * (1 + 1e-12)
    for length, curve, tokens in zip(lengths, curves, optimum.tokens, strict=True):
        assert length - curve.accepted(tokens, length) <= optimum.passes * (1 + 1e-9) + 1e-6, "all are done in N passes"
        assert tokens >= 0 and (tokens == 0 or length > optimum.passes)


@given(REQUESTS, COSTS)
def test_the_optimum_is_stationary_or_at_a_length(
    requests: list[tuple[float, AcceptanceCurve]], costs: StepCosts
) -> None:
    lengths = [length for length, _ in requests]
    optimum = optimal_budgets(lengths, [curve for _, curve in requests], costs)
    n = optimum.passes
    assume(all(abs(length / n - 1) > 1e-9 for length in lengths))  # at a length the derivative jumps
    assume(all(curve.k - 1 + n / length > 1e-6 for length, curve in requests))  # avoid cancellation
    saved = sum(1 / (curve.alpha * (curve.k - 1 + n / length)) for length, curve in requests if length > n)
    assert costs.token * saved == pytest.approx(costs.base, rel=1e-5)
    for tokens, (length, curve) in zip(optimum.tokens, requests, strict=True):
        expected = -length / curve.alpha * math.log(1 - (1 - n / length) / curve.k) if length > n else 0.0
        assert tokens == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_published_form_is_the_case_k_1() -> None:
    curve = AcceptanceCurve(0.8, 1.0)
    optimum = optimal_budgets([1000.0, 200.0], [curve, curve], StepCosts(1.0, 0.05))
    n = optimum.passes
    assert optimum.tokens == pytest.approx([1000 / 0.8 * math.log(1000 / n), max(0.0, 200 / 0.8 * math.log(200 / n))])


@given(REQUESTS, COSTS, st.integers(0, 16))
def test_rounds_stay_within_bounds_and_cheaper_tokens_buy_more(
    requests: list[tuple[float, AcceptanceCurve]], costs: StepCosts, most: int
) -> None:
    lengths, curves = [length for length, _ in requests], [curve for _, curve in requests]
    dear = optimal_budgets(lengths, curves, costs)
    assert all(0 <= number <= most for number in dear.per_round(most))
    cheap = optimal_budgets(lengths, curves, StepCosts(costs.base, costs.token / 2))
    assert cheap.passes <= dear.passes * (1 + 1e-9)
    assert all(a >= b * (1 - 1e-6) - 1e-6 for a, b in zip(cheap.tokens, dear.tokens, strict=True))


def test_long_requests_draft_and_short_ones_do_not() -> None:
    curve = AcceptanceCurve(0.7, 0.85)
    optimum = optimal_budgets([8000, 300, 100, 50], [curve] * 4, StepCosts(1.0, 0.01))
    assert optimum.tokens[0] > 0 and optimum.tokens[1:] == (0.0, 0.0, 0.0)
    assert optimum.per_round(7)[0] >= 3


def test_no_requests_get_no_budget() -> None:
    assert optimal_budgets([], [], StepCosts(1.0, 1.0)).per_round(3) == []


def test_tokens_that_cost_more_than_steps_get_no_budget() -> None:
    assert optimal_budgets([100.0], [AcceptanceCurve(0.5, 0.9)], StepCosts(1.0, 10.0)).tokens == (0.0,)


@pytest.mark.parametrize(
    "call",
    [
        lambda: AcceptanceCurve(0.0, 0.5),
        lambda: AcceptanceCurve(1.0, 1.5),
        lambda: StepCosts(1.0, 0.0),
        lambda: StepCosts(math.nan, 1.0),
        lambda: optimal_budgets([0.0], [AcceptanceCurve(1.0, 1.0)], StepCosts(1.0, 1.0)),
        lambda: optimal_budgets([1.0], [], StepCosts(1.0, 1.0)),
        lambda: fit_step_costs([1.0], []),
        lambda: fit_acceptance([1.0], [], []),
    ],
)
def test_bad_input_is_named(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"allowed"):
        call()


@settings(max_examples=25)
@given(st.floats(1e-3, 0.1), st.floats(1e-6, 1e-3), st.integers(0, 10_000))
def test_costs_are_recovered_from_noise_and_outliers(base: float, token: float, seed: int) -> None:
    rng = random.Random(seed)
    num_tokens = [rng.randint(1, 300) for _ in range(200)]
    seconds = [(base + token * n) * rng.gauss(1.0, 0.01) for n in num_tokens]
    for i in range(0, 200, 10):
        seconds[i] += rng.uniform(1, 5) * (base + 150 * token)  # an outlier
    fitted = fit_step_costs(num_tokens, seconds)
    assert fitted is not None
    middle = base + 150 * token
    assert fitted.base + 150 * fitted.token == pytest.approx(middle, rel=0.02)
    assert fitted.base == pytest.approx(base, abs=0.03 * middle)


def test_costs_that_cannot_be_identified_are_not_fitted() -> None:
    assert fit_step_costs([4, 4, 4], [1.0, 1.1, 0.9]) is None
    assert fit_step_costs([], []) is None
    falling = fit_step_costs([1, 2, 3, 4], [0.4, 0.3, 0.2, 0.1])
    assert falling is not None and 0 < falling.token < 1e-5


@settings(max_examples=40)
@given(st.floats(0.2, 1.5), st.floats(0.3, 1.0), st.integers(0, 10_000))
def test_acceptance_is_recovered_from_noise_and_outliers(alpha: float, k: float, seed: int) -> None:
    assume(alpha * k <= 1)
    curve, rng = AcceptanceCurve(alpha, k), random.Random(seed)
    lengths = [rng.randint(200, 4000) for _ in range(300)]
    drafted = [length * rng.uniform(0.05, 6.0) for length in lengths]
    accepted = [curve.accepted(p, n) * rng.gauss(1.0, 0.02) for n, p in zip(lengths, drafted, strict=True)]
    for i in range(0, 300, 15):
        accepted[i] = 0.0  # a request whose drafts were never accepted
    fitted = fit_acceptance(lengths, drafted, accepted)
    assert fitted is not None
    for share in (0.2, 1.0, 4.0):
        assert fitted.accepted(share, 1.0) == pytest.approx(curve.accepted(share, 1.0), rel=0.05, abs=0.01)
    assert fitted.alpha * fitted.k <= 1 + 1e-9


def test_without_drafts_acceptance_is_not_fitted() -> None:
    assert fit_acceptance([], [], []) is None
    assert fit_acceptance([100, 0], [0, 7], [0, 0]) is None
    never = fit_acceptance([100, 200], [50, 300], [0, 0])
    assert never is not None and never.accepted(50, 100) < 1
