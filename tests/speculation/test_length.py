"""Length classes from history, and the budgets of the running requests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.speculation.length import DEFAULT_CURVE, POLICIES, LengthPolicy, Policy
from megatron_tlt.speculation.length_classes import LengthClass, LengthHistory, LengthWindow
from megatron_tlt.speculation.strategy import StepRecord, Strategy

SHORT, MEDIUM, LONG = LengthClass


def trained(policy: Policy = "classes") -> LengthPolicy:
    """A policy that has seen 10 problems, 5 of them short (100 tokens), 3 medium (200), 2 long (1000)."""
    made = LengthPolicy(policy, max_length=2000)
    for epoch in range(4):
        for problem in range(10):
            request = f"{epoch}-{problem}"
            made.start(request, f"problem {problem}")
            made.finish(request, (100, 200, 1000)[(problem > 4) + (problem > 7)])
    return made


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 20), st.integers(0, 60), st.integers(0, 60))
def test_a_window_is_its_last_lengths(lengths: list[int], size: int, above: int, width: int) -> None:
    window, last = LengthWindow(size, lengths), lengths[-size:]
    assert window.to_list() == last and len(window) == len(last)
    assert window.count(above, above + width) == sum(above < length <= above + width for length in last)
    longer = sorted(length for length in last if length > above)
    assert window.median_above(above) == (longer[(len(longer) - 1) // 2] if longer else None)
    if last:
        median = window.quantile(0.5)
        assert sum(length <= median for length in last) >= len(last) // 2


def test_classes_follow_each_problems_history() -> None:
    policy = trained()
    assert policy.history.thresholds == (100, 200)
    assert policy.start("a", "problem 0") == SHORT
    assert policy.start("b", "problem 6") == MEDIUM
    assert policy.start("c", "problem 9") == LONG
    assert policy.start("d", "never seen") == SHORT, "half of all responses are short"
    assert policy.budgets("abcd", 8) == {"a": 0, "b": 4, "c": 8, "d": 0}
    assert policy.budgets("c", 0) == {"c": 0}


def test_a_growing_response_changes_its_class() -> None:
    policy = trained()
    policy.start("a", "problem 0")
    for num_tokens, expected in ((0, SHORT), (99, SHORT), (100, MEDIUM), (199, MEDIUM), (200, LONG), (5000, LONG)):
        policy.update("a", num_tokens)
        assert policy.current_class("a") == expected, num_tokens


def test_the_initial_class_counts_in_addition_to_the_length() -> None:
    """Past 100 tokens, responses that began as short mostly end medium; those that began as long end long."""
    history = LengthHistory()
    for _ in range(20):
        for length, initial in ((50, SHORT), (60, SHORT), (70, MEDIUM), (150, SHORT), (160, SHORT), (900, LONG)):
            history.add("p", length, initial)
    assert history.thresholds is not None and history.class_of(150) == MEDIUM and history.class_of(900) == LONG
    assert history.current_class(SHORT, 100) == MEDIUM
    assert history.current_class(LONG, 100) == LONG


def test_without_history_all_are_medium() -> None:
    policy = LengthPolicy()
    assert policy.start("a", "p") == MEDIUM
    assert policy.current_class("a") == MEDIUM and policy.budgets(["a"], 4) == {"a": 2}


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 300)), max_size=60),
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 400)), min_size=1, max_size=8),
    st.integers(0, 9),
)
def test_budgets_are_bounded_for_any_history(
    seen: list[tuple[int, int]], policy: Policy, running: list[tuple[int, int]], most: int
) -> None:
    made = LengthPolicy(policy, max_length=300)
    for i, (problem, length) in enumerate(seen):
        made.start(str(i), str(problem))
        made.finish(str(i), length, length // 2, length // 4)
    classes = []
    for i, (problem, num_tokens) in enumerate(running):
        made.start(f"r{i}", str(problem))
        made.update(f"r{i}", num_tokens)
        classes.append(made.current_class(f"r{i}"))
    names = [f"r{i}" for i in range(len(running))]
    budgets = made.budgets(names, most)
    assert list(budgets) == names and all(0 <= number <= most for number in budgets.values())
    if policy == "classes":
        assert all(budgets[name] == 0 for name, found in zip(names, classes, strict=True) if found == SHORT)
        assert all(budgets[name] == most for name, found in zip(names, classes, strict=True) if found == LONG)
    for (_, num_tokens), found in zip(running, classes, strict=True):
        assert not seen or found >= made.history.class_of(num_tokens), "a response does not shrink"


def test_the_optimum_drafts_for_the_last_to_end() -> None:
    policy = trained("optimal")
    policy.start("short", "problem 0")
    policy.start("long", "problem 9")
    budgets = policy.budgets(["short", "long"], 7)
    assert budgets["short"] == 0 and budgets["long"] > 0
    policy.update("long", 950)
    policy.update("short", 10)
    budgets = policy.budgets(["short", "long"], 64)
    assert budgets["short"] > budgets["long"], "50 tokens are left of the long one, 90 of the other"


def test_the_optimum_follows_measured_costs() -> None:
    """Drafts are not worth it if a token costs as much as half a step; they are if it costs almost nothing."""
    dear, cheap = trained("optimal"), trained("optimal")
    rng = random.Random(0)
    for policy, token in ((dear, 0.5), (cheap, 0.001)):
        for _ in range(40):
            batch, drafts = rng.randint(1, 8), rng.randint(0, 40)
            policy.observe(StepRecord(Strategy("ngram", 7), batch, 1.0 + token * (batch + drafts), batch, drafts))
        for i in range(40):
            length, drafted = rng.randint(100, 1000), rng.uniform(0.1, 4.0)
            policy.start(f"x{i}", f"other {i % 3}")
            drafts = int(drafted * length)
            accepted = int(DEFAULT_CURVE.accepted(drafts, length) / 2)
            policy.finish(f"x{i}", length, drafts, accepted)
        policy.start("a", "problem 9")
        policy.budgets(["a"], 7)
        assert policy.costs.token / policy.costs.base == pytest.approx(token, rel=0.01)
        expected = DEFAULT_CURVE.accepted(500, 1000) / 2
        assert policy.curve.accepted(500, 1000) == pytest.approx(expected, rel=0.05)
    assert dear.budgets(["a"], 7)["a"] == 0 < cheap.budgets(["a"], 7)["a"]


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from(POLICIES))
def test_a_loaded_state_continues_identically(seed: int, kind: Policy) -> None:
    def play(policy: LengthPolicy, rng: random.Random, steps: int) -> list[dict[str, int]]:
        found = []
        for step in range(steps):
            name = f"{seed}-{step}-{rng.random()}"
            policy.start(name, f"p{rng.randrange(5)}")
            policy.update(name, rng.randrange(200))
            found.append(policy.budgets([name], 7))
            length = rng.randrange(1, 300)
            policy.observe(StepRecord(Strategy("ngram", 7), 2, rng.random() + 0.1, 2, rng.randrange(15)))
            policy.finish(name, length, rng.randrange(2 * length), rng.randrange(length))
        return [dict(enumerate(entry.values())) for entry in found]

    rng = random.Random(seed)
    first = LengthPolicy(kind, max_length=400)
    play(first, rng, 30)
    second = LengthPolicy(kind, max_length=400)
    second.load_state(json.loads(json.dumps(first.state())))
    continued = random.Random(seed + 1)
    assert play(first, continued, 30) == play(second, random.Random(seed + 1), 30)
    assert first.state() == second.state()


def test_memory_is_bounded_and_the_oldest_problem_is_dropped_first() -> None:
    policy = LengthPolicy(history=LengthHistory(num_problems=3, per_problem=2, window=5))
    for i in range(2000):
        policy.start(f"{i}", f"p{i // 2 % 4}")
        policy.finish(f"{i}", 10 + i % 7, 5, 2)
        policy.observe(StepRecord(Strategy("ngram", 3), 1, 0.1, 1, i % 4))
    state = policy.state()
    assert [problem for problem, _ in state["history"]["problems"]] == ["p1", "p2", "p3"]
    assert all(len(lengths) == 2 for _, lengths in state["history"]["problems"])
    assert len(state["history"]["all"]) == 5 and all(len(row) <= 5 for row in state["history"]["by_initial"])
    assert len(json.dumps(state)) < 30_000
    smaller = LengthPolicy(history=LengthHistory(num_problems=1, per_problem=1, window=2))
    smaller.load_state(state)
    assert smaller.state()["history"]["problems"] == [["p3", [state["history"]["problems"][2][1][-1]]]]
    assert smaller.state()["history"]["all"] == state["history"]["all"][-2:]


def test_responses_of_other_engines_count() -> None:
    policy = trained()
    for _ in range(3):
        policy.record("elsewhere", 1500)
    assert policy.start("a", "elsewhere") == LONG
    policy.drop("a")
    assert policy.start("a", "elsewhere") == LONG, "dropped ones may come again"


@pytest.mark.parametrize(
    "call",
    [
        lambda policy: LengthPolicy("longest"),  # type: ignore[arg-type]
        lambda policy: LengthPolicy(max_length=0),
        lambda policy: LengthHistory(per_problem=0),
        lambda policy: policy.start("running", "p"),
        lambda policy: policy.update("gone", 3),
        lambda policy: policy.finish("gone", 3),
        lambda policy: policy.budgets(["gone"], 3),
        lambda policy: policy.budgets(["running"], -1),
        lambda policy: policy.load_state({}),
        lambda policy: policy.load_state({**policy.state(), "curve": [0.0, 1.0]}),
        lambda policy: policy.load_state({**policy.state(), "steps": [[1]]}),
        lambda policy: policy.load_state({**policy.state(), "history": {"problems": [["p", ["x"]]]}}),
    ],
)
def test_bad_input_is_named(call: Callable[[LengthPolicy], object]) -> None:
    policy = LengthPolicy()
    policy.start("running", "p")
    with pytest.raises(ValueError, match=r"allowed|running|not a state"):
        call(policy)


def test_an_aborted_response_counts_as_the_median_of_longer_ones() -> None:
    policy = LengthPolicy(max_length=1000)
    for name, tokens in (("a", 10), ("b", 40), ("c", 60), ("d", 80)):
        policy.start(name, "other")
        policy.finish(name, tokens)
    policy.start("cut", "p")
    policy.abort("cut", 50)
    assert policy.history.expected_length("p", LengthClass.MEDIUM, 0) == 60, "the lower median of 60 and 80"
    policy.start("not begun", "q")
    policy.abort("not begun", 0)
    policy.start("longest", "q")
    policy.abort("longest", 500)
    assert policy.history.expected_length("q", LengthClass.MEDIUM, 70) == 80, "q itself has none"
    with pytest.raises(ValueError):
        policy.abort("cut", 50)


def test_a_continued_response_has_the_tokens_that_it_began_with() -> None:
    made = LengthPolicy("classes", max_length=2000)
    for i, length in enumerate((10, 100, 1000)):
        made.start(f"seen{i}", "p")
        made.finish(f"seen{i}", length)
    made.start("new", "p")
    made.start("continued", "p", begun=900)
    for name in ("new", "continued"):
        made.update(name, 5)
    assert made.current_class("new") != LengthClass.LONG == made.current_class("continued")
