"""The unbiased pass@k."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.rewards.types import Reward
from megatron_tlt.trainer.evaluation import Evaluation, majority_is_correct, pass_at_k
from megatron_tlt.trainer.requests import request_seed


@given(st.integers(1, 7), st.data())
def test_equals_the_share_of_subsets_with_a_right_sample(samples: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    subsets = list(combinations(range(samples), k))
    share = sum(any(i < correct for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(samples, correct, k) == pytest.approx(share)


def test_k_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="k = 5 of 4"):
        pass_at_k(4, 1, 5)


def rewards(*problems: str) -> list[list[Reward]]:
    """Each problem's samples as letters: a capital is a correct answer, ``-`` none; the reward is 1 or 0."""
    return [
        [Reward(float(answer.isupper()), answer.isupper(), None if answer == "-" else answer) for answer in answers]
        for answers in problems
    ]


def test_means_over_problems() -> None:
    found = Evaluation.of(rewards("AAAA", "bcde", "AAbb"), [True, False, False])
    assert found.pass_at_1 == pytest.approx(0.5)
    assert found.pass_at_k == found.best_of_k == pytest.approx(2 / 3)
    assert found.greedy == pytest.approx(1 / 3)


def test_each_task_has_a_figure_of_its_own() -> None:
    found = Evaluation.of(rewards("AAAA", "bcde", "AAbb"), None, ["a", "b", "b"])
    assert found.pass_at_1_by_task == {"a": 1.0, "b": 0.25} and found.pass_at_1 == 0.5
    assert Evaluation.of(rewards("AAAA"), None).pass_at_1_by_task == {}


def test_the_majority_votes_with_answers_alone_and_the_first_of_equals_wins() -> None:
    cases = {"AAb": True, "Abb": False, "Ab-": True, "bA-": False, "---": False, "--A": True, "-bbAA": False}
    assert {case: majority_is_correct(rewards(case)[0]) for case in cases} == cases
    assert Evaluation.of(rewards("AAb", "Abb"), None).maj_at_k == 0.5
    assert Evaluation.of(rewards("--"), None).maj_at_k is None


@given(st.lists(st.sampled_from("Abc-"), min_size=1, max_size=8))
def test_a_majority_is_correct_only_if_a_sample_is(answers: list[str]) -> None:
    (samples,) = rewards("".join(answers))
    wins = majority_is_correct(samples)
    assert not wins or any(reward.correct for reward in samples)
    assert wins or 2 * sum(reward.correct for reward in samples) <= sum(
        reward.extracted is not None for reward in samples
    )


def test_the_best_of_k_is_the_highest_reward() -> None:
    graded = [[Reward(0.2, False), Reward(0.7, False)], [Reward(-1.0, False), Reward(-0.5, False)]]
    found = Evaluation.of(graded, None)
    assert found.best_of_k == pytest.approx(0.1) and found.figures == {
        "pass_at_1": 0.0,
        "pass_at_k": 0.0,
        "best_of_k": found.best_of_k,
    }


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    assert request_seed(1, "train", 2, "a", 0, 3) == request_seed(1, "train", 2, "a", 0, 3)
    seeds = {request_seed(run, step, sample) for run in range(3) for step in range(4) for sample in range(5)}
    assert len(seeds) == 60 and all(0 <= seed < 2**63 for seed in seeds)
