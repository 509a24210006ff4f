"""The packing benchmark's own baseline: padded in the order of arrival."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.bench.packing import plan_in_order


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(300, 2000))
def test_neighbours_stay_together_up_to_the_bound(lengths: list[int], bound: int) -> None:
    groups = plan_in_order(lengths, bound)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    assert all(group and len(group) * max(lengths[i] for i in group) <= bound for group in groups)
    for first, second in pairwise(groups):
        taken = [*first, second[0]]
        assert len(taken) * max(lengths[i] for i in taken) > bound, "one more would have fitted"
