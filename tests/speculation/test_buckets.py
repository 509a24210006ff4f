"""The bucket mapping of BEG-MAB, and the token budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.speculation.buckets import bucket_of, group_by_verify_tokens, map_buckets, within_budget
from megatron_tlt.speculation.strategy import DRAFTERS, MODEL_FREE, OFF, Strategy

speculating = st.builds(Strategy, st.sampled_from(DRAFTERS[1:]), st.integers(1, 12), st.booleans())
strategies = st.lists(speculating, min_size=1, max_size=12, unique=True).map(lambda found: [OFF, *found])
bounds = st.none() | st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True).map(sorted)


@given(strategies, st.integers(1, 64), bounds, st.none() | st.integers(0, 3))
def test_every_bucket_has_off_and_a_model_free_arm(
    found: list[Strategy], max_batch: int, upper: list[int] | None, neighbours: int | None
) -> None:
    buckets = map_buckets(found, min(max_batch, (upper or [64])[-1]), upper, neighbours)
    assert all(a.upper < b.upper for a, b in pairwise(buckets))
    for bucket in buckets:
        assert OFF in bucket.arms and len(bucket.arms) >= 2
        if any(strategy.drafter in MODEL_FREE for strategy in found):
            assert any(strategy.drafter in MODEL_FREE for strategy in bucket.arms)
        if neighbours is None:
            assert set(bucket.arms) == set(found)
        assert set(bucket.arms) <= set(found)


@given(strategies, st.integers(1, 64), bounds)
def test_published_larger_verification_on_smaller_batches(
    found: list[Strategy], max_batch: int, upper: list[int] | None
) -> None:
    buckets = map_buckets(found, min(max_batch, (upper or [64])[-1]), upper, neighbours=0, always=False)
    counts = [[arm.verify_tokens for arm in bucket.arms] for bucket in buckets]
    assert all(min(a) >= max(b) or a == b for a, b in pairwise(counts))
    if len(buckets) <= len(group_by_verify_tokens(found)):
        assert {arm for bucket in buckets for arm in bucket.arms} == set(found) - {OFF}, "none is lost"
    if upper is None and len(buckets) == len(group_by_verify_tokens(found)):
        assert all(len(set(tokens)) == 1 for tokens in counts), "one group in each"


@given(strategies, st.integers(1, 64), st.integers(1, 80))
def test_the_smallest_bucket_that_a_batch_fits_takes_it(found: list[Strategy], max_batch: int, batch: int) -> None:
    buckets = map_buckets(found, max_batch)
    chosen = bucket_of(buckets, batch)
    if batch > max_batch:
        assert chosen is None
        return
    assert chosen is not None and batch <= buckets[chosen].upper
    assert chosen == 0 or batch > buckets[chosen - 1].upper


@given(strategies, st.integers(1, 64), st.integers(1, 300))
def test_no_arm_is_over_the_budget(found: list[Strategy], batch: int, budget: int) -> None:
    arms = within_budget(found, batch, budget)
    assert OFF in arms
    assert all(arm == OFF or batch * arm.verify_tokens <= budget for arm in arms)
    assert within_budget(found[1:], batch, 1) == [OFF] or batch * found[1].verify_tokens <= 1
    assert within_budget(found, batch, None) == found
    withheld = set(found[-1].drafters)
    left = within_budget(found, batch, budget, withheld)
    assert left == ([arm for arm in arms if withheld.isdisjoint(arm.drafters)] or [OFF])


@pytest.mark.parametrize("wrong", [[], [0, 4], [4, 4], [8, 2]])
def test_invalid_bounds_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="bounds of the buckets"):
        map_buckets([OFF, Strategy("ngram", 3)], 32, wrong)
    with pytest.raises(ValueError, match="no strategies"):
        map_buckets([], 32)


def test_bounds_that_leave_out_the_largest_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 8, 32\]; the last must be 36 or more"):
        map_buckets([OFF, Strategy("ngram", 3)], 36, [2, 8, 32])
