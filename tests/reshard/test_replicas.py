"""Which replica differs, by majority."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.reshard.replicas import OddReplica, odd_replicas

SUMS = st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), min_size=1, max_size=12)


@given(SUMS, st.sets(st.integers(0, 500), min_size=1, max_size=9))
def test_equal_replicas_have_no_odd_one(sums: list[tuple[int, ...]], ranks: set[int]) -> None:
    assert odd_replicas(dict.fromkeys(ranks, sums)) == []


@given(SUMS, st.lists(st.integers(0, 500), min_size=2, max_size=9, unique=True), st.data())
def test_one_that_differs_is_found(sums: list[tuple[int, ...]], ranks: list[int], data: st.DataObject) -> None:
    tensor, word = data.draw(st.integers(0, len(sums) - 1)), data.draw(st.integers(0, 2))
    changed = [list(checksum) for checksum in sums]
    changed[tensor][word] ^= 1 << data.draw(st.integers(0, 62))
    found = odd_replicas({rank: changed if rank == ranks[-1] else sums for rank in ranks})
    if len(ranks) > 2:
        assert found == [OddReplica(ranks[-1], (tensor,), proven=True)]
    else:  # nobody knows which of two is wrong
        assert found == [OddReplica(rank, (tensor,), proven=False) for rank in sorted(ranks)]


def test_several_tensors_are_named_in_their_order() -> None:
    whole = [(1,), (2,), (3,), (4,)]
    assert odd_replicas({0: whole, 4: [(1,), (0,), (3,), (9,)], 8: whole}) == [OddReplica(4, (1, 3), proven=True)]


def test_without_a_majority_all_are_named() -> None:
    found = odd_replicas({0: [(1,)], 1: [(1,)], 2: [(2,)], 3: [(3,)]})
    assert found == [OddReplica(rank, (0,), proven=False) for rank in range(4)]


def test_ranks_with_other_tensors_are_no_replicas() -> None:
    with pytest.raises(ValueError, match=r"same tensors.*rank 0: 1, rank 1: 2"):
        odd_replicas({0: [(1,)], 1: [(1,), (2,)]})
