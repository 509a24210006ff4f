"""The unbiased pass@k."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.trainer.evaluation import Evaluation, pass_at_k
from megatron_tlt.trainer.experience import request_seed


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


def test_means_over_problems() -> None:
    found = Evaluation.from_counts([4, 0, 2], 4, [True, False, False])
    assert found.pass_at_1 == pytest.approx(0.5)
    assert found.pass_at_k == pytest.approx(2 / 3)
    assert found.greedy == pytest.approx(1 / 3)


def test_each_task_has_a_figure_of_its_own() -> None:
    found = Evaluation.from_counts([4, 0, 2], 4, None, ["a", "b", "b"])
    assert found.pass_at_1_by_task == {"a": 1.0, "b": 0.25} and found.pass_at_1 == 0.5
    assert Evaluation.from_counts([4], 4, None).pass_at_1_by_task == {}


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    assert request_seed(1, "train", 2, "a", 0, 3) == request_seed(1, "train", 2, "a", 0, 3)
    seeds = {request_seed(run, step, sample) for run in range(3) for step in range(4) for sample in range(5)}
    assert len(seeds) == 60 and all(0 <= seed < 2**63 for seed in seeds)
