"""Micro-batches under a token bound and balanced ranks, as properties."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.data.packing import balance, plan_micro_batches, plan_packs, sequence_cost, split_to_count
from megatron_tlt.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@settings(max_examples=300)
@given(LENGTHS, st.integers(300, 2000))
def test_micro_batches_hold_everything_once_within_the_bound(lengths: list[int], bound: int) -> None:
    batches = plan_micro_batches(lengths, bound)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batch for batch in batches)
    assert all(len(batch) * max(lengths[i] for i in batch) <= bound for batch in batches)
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(lengths, reverse=True)


@settings(max_examples=200)
@given(LENGTHS, st.integers(300, 2000))
def test_no_two_neighbouring_micro_batches_could_be_one(lengths: list[int], bound: int) -> None:
    batches = plan_micro_batches(lengths, bound)
    for first, second in pairwise(batches):
        assert (len(first) + len(second)) * lengths[first[0]] > bound


def test_micro_batches_of_known_lengths() -> None:
    assert plan_micro_batches([10, 40, 20, 10], 40) == [[1], [2, 0], [3]]
    assert plan_micro_batches([], 20) == []


def test_a_sequence_above_the_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a sequence has 41 tokens.*max_tokens_per_micro_batch 40"):
        plan_micro_batches([3, 41], 40)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 8))
def test_balance_holds_everything_once_and_evenly(lengths: list[int], ranks: int) -> None:
    parts = balance(lengths, ranks)
    assert len(parts) == ranks
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert parts == [sorted(part) for part in parts]
    totals = [sum(lengths[i] for i in part) for part in parts]
    assert max(totals) - min(totals) <= max(lengths, default=0)
    assert all(parts) or len(lengths) < ranks
    # Graham's bound for longest-first: at most 4/3 of what no split can go below.
    if len(lengths) > ranks:
        ordered = sorted(lengths, reverse=True)
        lower = max(sum(lengths) / ranks, ordered[0], ordered[ranks - 1] + ordered[ranks])
        assert max(totals) <= lower * 4 / 3 + 1e-9


@settings(max_examples=300)
@given(st.lists(st.integers(0, 300), max_size=60), st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.7]), min_size=1))
def test_balance_by_speed_holds_everything_once_and_ends_together(lengths: list[int], speeds: list[float]) -> None:
    parts = balance(lengths, len(speeds), speeds)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert parts == [sorted(part) for part in parts]
    times = [sum(lengths[i] for i in part) / speed for part, speed in zip(parts, speeds, strict=True)]
    for time, speed in zip(times, speeds, strict=True):
        assert max(times) - time <= max(lengths, default=0) / speed + 1e-9
    if len(set(speeds)) == 1:
        assert parts == balance(lengths, len(speeds))


def test_balance_of_known_lengths() -> None:
    assert balance([7, 6, 5, 4], 2) == [[0, 3], [1, 2]]
    assert balance([7, 6, 5, 4, 2], 2, [1, 0.5]) == [[0, 2, 3], [1, 4]]
    with pytest.raises(ValueError, match="1 speeds of 2 ranks"):
        balance([1], 2, [1.0])
    with pytest.raises(ValueError, match="ranks is 0"):
        balance([1], 0)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(60, 200), st.floats(0, 0.1))
def test_packs_hold_everything_once_within_the_bound(lengths: list[int], bound: int, share: float) -> None:
    packs = plan_packs(lengths, [sequence_cost(n, share) for n in lengths], bound)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(pack and sum(lengths[i] for i in pack) <= bound for pack in packs)


def test_packs_of_known_lengths_are_of_like_cost() -> None:
    lengths = [90, 10, 50, 40, 10]
    assert plan_packs(lengths, lengths, 100) == [[0, 1], [2, 3, 4]]
    assert plan_packs([], [], 100) == []
    with pytest.raises(ConfigError, match="101 tokens"):
        plan_packs([101], [101], 100)


def test_attention_makes_long_sequences_dear() -> None:
    assert sequence_cost(100, 0.0) == 100
    assert sequence_cost(100, 0.01) == 200
    lengths = [200, 50, 50, 50, 50]
    assert balance([sequence_cost(n, 0.0) for n in lengths], 2) == [[0], [1, 2, 3, 4]]
    costs = [sequence_cost(n, 0.05) for n in lengths]
    assert [sum(costs[i] for i in part) for part in balance(costs, 2)] == [2200.0, 700.0]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(0, 50))
def test_splitting_keeps_everything_and_reaches_the_count(lengths: list[int], count: int) -> None:
    packs = plan_packs(lengths, lengths, 100)
    split = split_to_count(packs, lengths, count)
    assert len(split) == max(len(packs), count)
    assert sorted(i for group in split for i in group) == list(range(len(lengths)))
    assert all(split) or all(len(group) <= 1 for group in split), "an empty one beside one that could be halved"
