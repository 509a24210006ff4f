"""Slow ranks, on plain numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.trainer.straggler_check import StragglerCheck

HOSTS = ["n0", "n0", "n1", "n1"]


def test_a_rank_is_named_once_after_so_many_steps_and_again_after_it_was_well() -> None:
    check = StragglerCheck(1.5, 3, HOSTS)
    slow = {"update": [1e-3, 1e-3, 2e-3, 1e-3], "rollout": [1e-3] * 4}
    assert [check.add_times(slow) for _ in range(2)] == [[], []]
    (line,) = check.add_times(slow)
    assert line == "rank 2 (n1) is slow in update: 2 ms per token, 2.00 times the median of 4 ranks (for 3 steps)"
    assert check.add_times(slow) == [] and check.ratio == 2.0 and check.active == 1
    assert check.add_times({"update": [1e-3] * 4}) == [] and check.ratio == 1.0 and check.active == 0
    assert sum(len(check.add_times(slow)) for _ in range(3)) == 1


def test_a_step_in_between_that_was_well_starts_the_count_anew() -> None:
    check = StragglerCheck(1.5, 3, HOSTS)
    slow, well = {"update": [1.0, 1.0, 2.0, 1.0]}, {"update": [1.0] * 4}
    assert [check.add_times(each) for each in (slow, slow, well, slow, slow)] == [[]] * 5


def test_ranks_that_are_not_measured_are_neither_slow_nor_well() -> None:
    check = StragglerCheck(1.5, 2, HOSTS)
    assert check.add_times({"rollout": [1.0, None, 4.0, None]}) == []
    assert check.add_times({"rollout": [1.0, None, None, None]}) == [] and check.ratio == 1.0
    (line,) = check.add_times({"rollout": [1.0, None, 4.0, None]})
    assert "rank 2 (n1) is slow in rollout" in line and "4.00 times the median of 2 ranks" in line
    assert check.add_times({"rollout": [None] * 4}) == []


def test_of_two_ranks_the_slow_one_is_named() -> None:
    check = StragglerCheck(1.5, 1, ["n0", "n1"])
    (line,) = check.add_times({"log-probs": [3e-3, 1e-3]})
    assert "rank 0 (n0)" in line and "3.00 times" in line


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8), st.floats(1.1, 5.0))
def test_never_more_than_half_of_the_ranks_are_slow(seconds: list[float], factor: float) -> None:
    check = StragglerCheck(factor, 1, ["n"] * len(seconds))
    assert len(check.add_times({"update": seconds})) <= len(seconds) // 2
    assert check.ratio >= 1.0
