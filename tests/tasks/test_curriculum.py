"""Weights by pass rate: what is drawn, that nothing is lost between changes, and that a resumed run goes on alike."""

from __future__ import annotations

import json
from collections import Counter
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.task import CurriculumConfig, TaskConfig
from megatron_tlt.tasks.curriculum import CurriculumMixture
from megatron_tlt.tasks.mixture import ProblemMixture, build_sources
from megatron_tlt.tasks.sources import Source
from megatron_tlt.tasks.types import Problem


class Counted:
    """Problems that are their own numbers."""

    def __init__(self, label: str) -> None:
        self.label = label

    def problem(self, index: int) -> Problem:
        return Problem(f"{self.label}/train/{index}", self.label, str(index), "", "math")


def mixture(weights: dict[str, float], floor: float = 0.2, decay: float = 0.5) -> CurriculumMixture:
    sources = cast("list[Source]", [Counted(label) for label in weights])
    plain = ProblemMixture(sources, list(weights.values()), "train", 1)
    return CurriculumMixture(plain, CurriculumConfig(floor=floor, decay=decay), seed=1)


def judged(problems: list[Problem], rates: dict[str, float]) -> list[tuple[str, bool]]:
    """Of each task's responses in turn, about the given share is correct."""
    seen: Counter[str] = Counter()
    rows = []
    for problem in problems:
        number, rate = seen[problem.source], rates[problem.source]
        rows.append((problem.uid, int((number + 1) * rate) > int(number * rate)))
        seen[problem.source] += 1
    return rows


def test_tasks_of_medium_difficulty_are_drawn_most() -> None:
    curriculum, first = mixture({"easy": 1.0, "medium": 1.0, "hard": 1.0}), 0
    for _ in range(8):
        problems = [curriculum.problem(first + i) for i in range(300)]
        first += 300
        metrics = curriculum.end_step(first, judged(problems, {"easy": 1.0, "medium": 0.5, "hard": 0.0}))
    assert metrics["curriculum/medium_pass_rate"] == pytest.approx(0.5, abs=0.02)
    assert metrics["curriculum/easy_weight"] == pytest.approx(0.2 / 1.4, abs=0.01)
    drawn = Counter(curriculum.problem(first + i).source for i in range(1000))
    assert drawn["medium"] == pytest.approx(1000 / 1.4, abs=20) and drawn["hard"] == pytest.approx(200 / 1.4, abs=20)


def test_a_tasks_own_weight_counts_and_an_unknown_rate_is_medium() -> None:
    curriculum = mixture({"a": 3.0, "b": 1.0})
    drawn = Counter(curriculum.problem(i).source for i in range(1000))
    assert drawn["a"] == pytest.approx(750, abs=5)
    metrics = curriculum.end_step(1000, [])
    assert metrics == {"curriculum/a_weight": 0.75, "curriculum/b_weight": 0.25}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_every_problem_of_a_task_is_used_once_and_in_sequence(steps: list[tuple[int, float, float]]) -> None:
    curriculum, first, used = mixture({"a": 1.0, "ab": 2.0}), 0, []
    for count, rate_a, rate_b in steps:
        problems = [curriculum.problem(first + i) for i in range(count)]
        used += problems
        first += count
        curriculum.end_step(first, judged(problems, {"a": rate_a, "ab": rate_b}))
    for label in ("a", "ab"):
        numbers = [int(problem.prompt) for problem in used if problem.source == label]
        assert sorted(numbers) == list(range(len(numbers)))


def test_a_resumed_run_draws_the_same() -> None:
    one, other = mixture({"a": 1.0, "b": 1.0}), mixture({"a": 1.0, "b": 1.0})
    problems = [one.problem(i) for i in range(50)]
    one.end_step(50, judged(problems, {"a": 0.9, "b": 0.4}))
    other.restore(json.loads(json.dumps(one.state)))
    assert [one.problem(i).uid for i in range(50, 150)] == [other.problem(i).uid for i in range(50, 150)]
    with pytest.raises(IndexError, match="allowed: 50 and more"):
        one.problem(49)


def test_real_tasks_are_known_by_their_problems() -> None:
    tasks = [TaskConfig(name="gcd"), TaskConfig(name="chain_sum"), TaskConfig(name="gcd", weight=2.0)]
    plain = build_sources(tasks, "train", 0)
    curriculum = CurriculumMixture(plain, CurriculumConfig(), 0)
    rows = [(curriculum.problem(i).uid, True) for i in range(40)]
    metrics = curriculum.end_step(40, rows)
    assert {name for name in metrics if name.endswith("pass_rate")} == {
        "curriculum/gcd#0_pass_rate",
        "curriculum/chain_sum_pass_rate",
        "curriculum/gcd#2_pass_rate",
    }
    assert curriculum.held_out(3) == plain.held_out(3)
