"""All tuners through their common interface: choices, refusals, and restored states."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.bench.tuner_oracle import OracleTuner
from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.strategy import OFF, BudgetMix, StepRecord, Strategy
from megatron_tlt.speculation.tuner import Tuner
from megatron_tlt.speculation.tuner_beg_mab import PUBLISHED, BegMabOptions, BegMabTuner
from megatron_tlt.speculation.tuner_solver import SolverOptions, SolverTuner
from megatron_tlt.speculation.tuners import TUNERS
from megatron_tlt.speculation.tuners import build_tuner as build_any_tuner

MAX_BATCH = 36
EAGLE = [Strategy("eagle", k) for k in (1, 3, 5)]
STRATEGIES = [OFF, Strategy("ngram", 3), *EAGLE]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("beg_mab", {}),
    ("beg_mab", {"reward": "throughput", "neighbours": 0}),
    ("beg_mab", {"reward": "per_request", "epsilon": 0.5}),
    ("solver", {"refresh": 40}),
    ("solver", {"inline": False}),
]
cases = st.sampled_from(CASES)


def build_tuner(name: str, found: Sequence[Strategy], options: Mapping[str, Any] | None = None, seed: int = 0) -> Tuner:
    return build_any_tuner(name, found, options, seed, max_batch=MAX_BATCH)


def seconds_of(strategy: Strategy, batch: int) -> float:
    return 0.01 * (1 + 0.015 * batch * strategy.verify_tokens + 0.05 * strategy.num_tokens)


def batch_of(step: int) -> int:
    """Batches fall from 32 to 1 repeatedly."""
    return max(1, int(32 * 0.9 ** (step % 40)))


def world(rng: random.Random, strategy: Strategy, batch: int, alpha: float = 0.7) -> StepRecord:
    """A step whose time grows with the verified tokens; the drafter's tokens are accepted with ``alpha``."""
    accepted = [0] * strategy.num_tokens
    for _ in range(batch):
        for j in range(strategy.num_tokens):
            if rng.random() >= alpha:
                break
            accepted[j] += 1
    seconds = seconds_of(strategy, batch) * rng.lognormvariate(0, 0.1)
    drafts = batch * strategy.num_tokens
    return StepRecord(strategy, batch, seconds, batch + sum(accepted), drafts, tuple(accepted))


def drive(tuner: Tuner, rng: random.Random, steps: int, alpha: float = 0.7) -> list[Strategy]:
    """The choices; each is observed for three steps."""
    chosen = []
    for step in range(steps):
        batch = batch_of(step)
        strategy = tuner.choose(batch)
        chosen.append(strategy)
        for _ in range(3):
            tuner.observe(world(rng, strategy, batch, alpha))
    return chosen


@settings(max_examples=25)
@given(cases, st.integers(0, 1000), st.integers(0, 60))
def test_a_loaded_state_continues_and_choices_follow_the_seed(
    case: tuple[str, dict[str, Any]], seed: int, cut: int
) -> None:
    name, options = case
    whole, first, resumed = (build_tuner(name, STRATEGIES, options, seed) for _ in range(3))
    rng = random.Random(seed)
    before = drive(whole, rng, cut)
    assert before == drive(first, random.Random(seed), cut)
    resumed.load_state(json.loads(json.dumps(first.state())))
    position = rng.getstate()
    after = drive(whole, rng, 30)
    rng.setstate(position)
    assert after == drive(resumed, rng, 30)


@settings(max_examples=40)
@given(cases, st.integers(0, 1000), st.integers(1, 100), st.lists(st.integers(1, 40), max_size=40))
def test_no_choice_is_over_the_token_budget(
    case: tuple[str, dict[str, Any]], seed: int, budget: int, batches: list[int]
) -> None:
    name, options = case
    tuner = build_tuner(name, STRATEGIES, {**options, "token_budget": budget}, seed)
    rng = random.Random(seed)
    for batch in batches:
        chosen = tuner.choose(batch)
        assert chosen in tuner.strategies
        assert chosen == OFF or batch * chosen.verify_tokens <= budget
        tuner.observe(world(rng, chosen, batch))


@pytest.mark.parametrize("name", ["beg_mab", "solver"])
def test_a_drafter_that_is_never_right_is_dropped(name: str) -> None:
    chosen = drive(build_tuner(name, STRATEGIES, {}, 1), random.Random(2), 200, alpha=0.0)
    assert chosen[-100:].count(OFF) >= 75


@pytest.mark.parametrize("name", ["beg_mab", "solver"])
def test_a_good_drafter_is_found_again_after_it_was_bad(name: str) -> None:
    tuner, rng = build_tuner(name, STRATEGIES, {}, 1), random.Random(2)
    drive(tuner, rng, 120, alpha=0.0)
    assert drive(tuner, rng, 200, alpha=0.9)[-100:].count(OFF) <= 10


def test_published_one_group_in_each_bucket_and_untried_arms_first() -> None:
    two = [*EAGLE, Strategy("eagle3", 5)]
    tuner = build_tuner("beg_mab", two, {**PUBLISHED, "epsilon": 0.0, "bounds": [2, 8, 36]}, 0)
    first = tuner.choose(1)
    tuner.observe(StepRecord(first, 1, 1.0, 5))
    second = tuner.choose(1)
    assert {first, second} == {Strategy("eagle", 5), Strategy("eagle3", 5)}
    tuner.observe(StepRecord(second, 1, 1.0, 3))
    assert tuner.choose(2) == first
    for _ in range(3):
        tuner.observe(StepRecord(first, 2, 4.0, 6))
    assert tuner.choose(1) == second, "the median of tokens per second"
    assert tuner.choose(8) == Strategy("eagle", 3) and tuner.choose(9) == Strategy("eagle", 1)


def test_published_arms_of_a_new_version_are_untried() -> None:
    arms = [Strategy("eagle", 2), Strategy("ngram", 2)]
    tuner = BegMabTuner(arms, BegMabOptions(**PUBLISHED | {"epsilon": 0.0}), seed=1, max_batch=MAX_BATCH)
    for arm, tokens in zip(arms, (4, 12), strict=True):
        tuner.observe(StepRecord(arm, 4, 0.01, tokens, 8))
    assert tuner.choose(4) == arms[1]
    tuner.drafter_changed("eagle")
    assert tuner.choose(4) == arms[0]


def test_a_solver_measures_a_new_version() -> None:
    arms = [OFF, Strategy("eagle", 2)]
    tuner = SolverTuner(arms, SolverOptions(samples=1, inline=False, refresh=10**6), max_batch=MAX_BATCH)
    for _ in range(20):
        tuner.observe(StepRecord(OFF, 4, 0.01, 4))
        tuner.observe(StepRecord(arms[1], 4, 0.03, 4, 8))
    assert tuner.choose(4) == OFF
    tuner.drafter_changed("eagle")
    assert tuner.choose(4) == arms[1]
    tuner.observe(StepRecord(arms[1], 4, 0.03, 4, 8))
    assert tuner.choose(4) == OFF


def test_published_window_forgets() -> None:
    tuner = build_tuner("beg_mab", [OFF, EAGLE[0]], {"reward": "per_request", "epsilon": 0.0, "window": 5}, 0)
    for reward in [1] * 100 + [4] * 5:
        tuner.observe(StepRecord(EAGLE[0], 2, 1.0, 2 * reward))
        tuner.observe(StepRecord(OFF, 2, 0.5, 2))
    assert tuner.choose(2) == EAGLE[0]


def test_exploration_stays_within_its_cost() -> None:
    bad = Strategy("eagle", 5)

    def cost(**options: Any) -> float:
        """Total extra cost of choosing a drafter that is never right, in units of an "off" choice."""
        tuner = build_tuner("beg_mab", [OFF, bad], options, 0)
        chosen = drive(tuner, random.Random(0), 600, alpha=0.0)
        assert bad in chosen
        batches = (batch_of(step) for step, strategy in enumerate(chosen) if strategy == bad)
        return sum(seconds_of(bad, batch) / seconds_of(OFF, batch) - 1 for batch in batches)

    bounded = cost(explore_cost=0.01, explore_credit=1.0)
    # a choice is charged at its expected cost, which is optimistic for a drafter unused for long
    assert bounded < 1.5 * (1.0 + 600 * 0.01)
    assert bounded < cost(reward="per_request"), "one choice in ten at random"


def test_a_solver_lists_missing_profiles_and_profiles_inline_or_before() -> None:
    rng = random.Random(0)
    before = SolverTuner(STRATEGIES, max_batch=MAX_BATCH)
    assert set(before.wanted()) == {(strategy, batch) for strategy in STRATEGIES for batch in (1, 4, 16)}
    while before.wanted():
        before.observe(world(rng, *before.wanted()[0]))
    assert drive(before, rng, 10) != STRATEGIES[:1] * 10
    for strategy in STRATEGIES:
        expected = {"off": 1.0}.get(strategy.drafter, before.speedup(strategy, 8))
        assert before.speedup(strategy, 8) == pytest.approx(expected)
    inline = SolverTuner(STRATEGIES, max_batch=MAX_BATCH)
    drive(inline, rng, 80)
    assert inline.wanted() == []


def test_an_oracle_takes_the_best() -> None:
    rates = {OFF: 1.0, EAGLE[0]: 2.0, EAGLE[2]: 3.0}
    tuner = OracleTuner(list(rates), lambda strategy, batch: rates[strategy] / (batch if strategy != OFF else 1))
    assert [tuner.choose(batch) for batch in (1, 2, 4)] == [EAGLE[2], EAGLE[2], OFF]
    assert OracleTuner(list(rates), lambda s, b: rates[s], token_budget=4).choose(2) == EAGLE[0]


def test_steps_of_foreign_strategies_are_harmless() -> None:
    for name in ("beg_mab", "solver"):
        tuner = build_tuner(name, [OFF, EAGLE[0]], {}, 0)
        tuner.observe(StepRecord(Strategy("suffix", 9), 1, 1.0, 5))
        assert tuner.choose(1) in (OFF, EAGLE[0])


def test_a_static_tuner_stays_within_the_budget() -> None:
    tuner = build_tuner("static", [EAGLE[1]], {"token_budget": 32})
    assert [tuner.choose(batch) for batch in (8, 9)] == [EAGLE[1], OFF]
    with pytest.raises(ValueError, match="exactly one"):
        build_tuner("static", STRATEGIES)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("greedy", {}, "allowed are beg_mab, solver, static"),
        ("beg_mab", {"epsilom": 0.1}, "unknown option epsilom; allowed are .*epsilon"),
        ("beg_mab", {"epsilon": 1.5}, "epsilon is 1.5; allowed: 0 to 1"),
        ("beg_mab", {"epsilon": "high"}, "wrong type"),
        ("beg_mab", {"reward": "mean"}, "reward is 'mean'; allowed: model, per_request, throughput"),
        ("beg_mab", {"window": 0}, "window is 0; allowed: 1 and more"),
        ("beg_mab", {"bounds": [4, 2]}, "ascending"),
        ("solver", {"batches": []}, "batches is empty"),
        ("solver", {"samples": 0}, "samples is 0; allowed: 1 and more"),
        ("static", {"token_budget": 0}, "token_budget is 0; allowed: 1 and more"),
    ],
)
def test_a_wrong_name_or_option_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tuner(name, STRATEGIES[:1] if name == "static" else STRATEGIES, options)


def test_a_solver_without_off_is_refused() -> None:
    with pytest.raises(ValueError, match="off must be among them"):
        build_tuner("solver", EAGLE)


@pytest.mark.parametrize("name", sorted(TUNERS))
def test_another_tuners_state_is_refused(name: str) -> None:
    few = STRATEGIES[:1] if name == "static" else STRATEGIES[:2]
    tuner = build_tuner(name, few)
    with pytest.raises(ValueError, match=f"tuner {name}: the state is of tuner 'other'"):
        tuner.load_state({**tuner.state(), "tuner": "other"})
    with pytest.raises(ValueError, match=f"tuner {name}: the state is over"):
        tuner.load_state({**tuner.state(), "strategies": ["eagle-9"]})


def play_at(name: str, batch: int, alpha: float, steps: int) -> list[tuple[Strategy, float, float]]:
    """(strategy, tokens, seconds) of each step at a constant batch, below a gate of 128; drafts never pay off."""
    gate = ElasticGate(128, patience=1)
    found = [OFF, *(Strategy("eagle", k) for k in (1, 3, 5, 7))]
    controller = SpeculationController(build_any_tuner(name, found, {}, 1, max_batch=gate.max_batch), gate)
    rng, verified, played = random.Random(0), OFF, []
    for _ in range(steps):
        drafted = controller.choose(batch)
        step = world(rng, verified, batch, alpha)
        costs = [1 + 0.002 * batch + 0.02 * batch * arm.num_tokens for arm in (verified, drafted)]
        seconds = 0.01 * sum(costs) / 2 * rng.lognormvariate(0, 0.1)
        counts = step.accepted_per_position
        controller.observe(
            StepRecord(verified, batch, seconds, step.num_tokens, step.num_draft_tokens, counts, next_strategy=drafted)
        )
        played.append((verified, step.num_tokens, 0.01 * sum(costs) / 2))
        verified = drafted
    return played


@pytest.mark.parametrize("name", ["beg_mab", "solver"])
def test_at_a_batch_of_100_a_loser_is_dropped(name: str) -> None:
    settled = play_at(name, 100, alpha=0.8, steps=900)[400:]
    rate = sum(tokens for _, tokens, _ in settled) / sum(seconds for _, _, seconds in settled)
    assert rate > 0.96 * 100 / (0.01 * 1.2), "of off"


@pytest.mark.parametrize(("name", "options"), CASES)
def test_above_the_largest_batch_nothing_is_drafted_and_no_bucket_learns(name: str, options: dict[str, Any]) -> None:
    tuner = build_tuner(name, STRATEGIES, options)
    drive(tuner, random.Random(0), 40)
    before = [tuner.choose(batch) for batch in (MAX_BATCH + 1, 10 * MAX_BATCH)]
    assert before == [OFF, OFF]
    state = json.loads(json.dumps(tuner.state()))
    for _ in range(40):  # plain steps of a full engine produce many tokens per second
        tuner.observe(StepRecord(OFF, 10 * MAX_BATCH, 0.02, 10 * MAX_BATCH))
    after = tuner.state()
    assert after.get("scores", {}).get("rewards") == state.get("scores", {}).get("rewards")
    assert after.get("missing") == state.get("missing")


def test_rewards_of_other_buckets_are_refused() -> None:
    options = {"reward": "throughput", "neighbours": 0}
    small = build_any_tuner("beg_mab", STRATEGIES, options, max_batch=36)
    large = build_any_tuner("beg_mab", STRATEGIES, options, max_batch=132)
    drive(small, random.Random(0), 20)
    with pytest.raises(ValueError, match=r"the state's buckets end at \[.*36\]; allowed: \[.*132\]"):
        large.load_state(small.state())


@pytest.mark.parametrize("name", ["beg_mab", "solver"])
def test_a_state_of_a_smaller_range_loads_in_a_larger_one(name: str) -> None:
    small, large = (build_any_tuner(name, STRATEGIES, {}, max_batch=batch) for batch in (36, 260))
    drive(small, random.Random(0), 120)
    large.load_state(json.loads(json.dumps(small.state())))
    assert drive(large, random.Random(1), 40)[-20:].count(OFF) <= 10
    if isinstance(large, SolverTuner):
        assert {batch for _, batch in large.wanted()} == {64, 256}
        old = {key: value for key, value in small.state().items() if key != "grid"}
        large.load_state(old)
        assert {batch for _, batch in large.wanted()} == {64, 256}


def test_a_solvers_grid_ends_where_the_gate_does() -> None:
    tuner = build_any_tuner("solver", STRATEGIES, {}, max_batch=104)
    assert isinstance(tuner, SolverTuner) and {batch for _, batch in tuner.wanted()} == {1, 4, 16, 64}
    with pytest.raises(ValueError, match=r"batches are \[4, 128\]; allowed: up to 104"):
        build_any_tuner("solver", STRATEGIES, {"batches": [4, 128]}, max_batch=104)


@pytest.mark.parametrize("name", ["beg_mab", "solver"])
def test_with_one_draft_each_a_strategy_is_judged_by_one_draft(name: str) -> None:
    """A drafting step takes twice as long and gains 1.7 tokens per request."""
    arm, rng = Strategy("suffix", 7, by_length=True), random.Random(0)
    tuner = build_tuner(name, [OFF, arm])
    mix = BudgetMix.of([1] * 8)
    chosen = []
    for _ in range(200):
        chosen.append(tuner.choose(8, lambda strategy: mix if strategy == arm else None))
        for _ in range(3):
            accepted = sum(rng.random() < 0.7 for _ in range(8)) if chosen[-1] == arm else 0
            seconds = 0.01 * (2 if chosen[-1] == arm else 1) * rng.lognormvariate(0, 0.05)
            drafts = 8 if chosen[-1] == arm else 0
            counts, budgets = ((accepted,), mix) if drafts else ((), None)
            tuner.observe(StepRecord(chosen[-1], 8, seconds, 8 + accepted, drafts, counts, budgets))
    assert chosen[50:].count(OFF) >= 130


@pytest.mark.parametrize("name", ["beg_mab", "solver"])
def test_a_choice_uses_the_current_budgets(name: str) -> None:
    """With seven drafts each the strategy pays off; with one, which takes nearly as long, it does not."""
    arm, rng = Strategy("suffix", 7, by_length=True), random.Random(0)
    tuner = build_tuner(name, [OFF, arm])
    mixes = {budget: BudgetMix.of([budget] * 8) for budget in (1, 7)}
    chosen: dict[int, list[Strategy]] = {1: [], 7: []}
    for turn in range(400):
        budget = 1 if turn % 2 else 7
        strategy = tuner.choose(8, lambda arm, budget=budget: None if arm == OFF else mixes[budget])  # type: ignore[misc]
        chosen[budget].append(strategy)
        for _ in range(3):
            accepted = [0] * 7
            for _ in range(8 if strategy == arm else 0):
                for j in range(budget):
                    if rng.random() >= 0.8:
                        break
                    accepted[j] += 1
            seconds = 0.01 * (2.1 + 0.1 * budget if strategy == arm else 1) * rng.lognormvariate(0, 0.05)
            budgets = mixes[budget] if strategy == arm else None
            drafts = 8 * budget if strategy == arm else 0
            tuner.observe(StepRecord(strategy, 8, seconds, 8 + sum(accepted), drafts, tuple(accepted), budgets))
    assert chosen[7][-100:].count(arm) >= 90 and chosen[1][-100:].count(OFF) >= 85
