"""A rank's side: it follows only the newest directive and enters only sessions it is ordered into."""

from __future__ import annotations

import pytest

from megatron_tlt.spot.follower import Follower
from megatron_tlt.spot.types import Advice, Directive, SessionOrder


def order(generation: int = 1, session: int = 1, start: int = 0, *, at_once: bool = False) -> SessionOrder:
    return SessionOrder(0, session, generation, (0, 1), 0, start, start + 2, at_once)


def told(
    sequence: int, wanted: SessionOrder | None, rl_step: int = 0, *, over: bool = False, rank: int = 0
) -> Directive:
    return Directive(rank, sequence, rl_step, over, wanted)


@pytest.fixture
def rank() -> Follower:
    follower = Follower(0, silent_after_s=5.0, now=0.0)
    follower.rollout_started(0)
    follower.released(0, 3, 4)
    return follower


def test_a_report_holds_the_complete_state(rank: Follower) -> None:
    rank.hear(told(7, order()), 0.0)
    assert rank.enter(order(), 0.0)
    rank.at_step_boundary(5)
    first, second = rank.report(), rank.report()
    assert (first.rl_step, first.released, first.available, first.num_entries, first.drafter_version) == (
        0,
        True,
        True,
        3,
        5,
    )
    assert first.place is not None and (first.place.session, first.place.generation, first.place.step) == (1, 1, 1)
    assert first.heard == 7 and second.sequence == first.sequence + 1


def test_old_repeated_and_misdirected_directives_are_counted_only(rank: Follower) -> None:
    assert rank.hear(told(7, None, over=True), 0.0)
    for directive in (told(6, order()), told(7, order()), told(8, order(), rank=1)):
        assert not rank.hear(directive, 4.0)
    assert rank.order is None and rank.counts == {"replayed": 2, "misdirected": 1}
    assert rank.silent_for(4.0) == 4.0, "they are no sign of life either"


def test_a_directive_for_another_rl_step_orders_nothing(rank: Follower) -> None:
    rank.hear(told(7, order()), 0.0)
    rank.rollout_started(1)
    rank.hear(told(8, order(), over=True), 0.0)
    assert rank.order is None and not rank.rollout_over(1) and rank.counts == {"of another RL step": 1}


def test_a_generation_is_entered_once_and_only_while_ordered(rank: Follower) -> None:
    rank.hear(told(1, order()), 0.0)
    assert not rank.enter(order(2), 0.0), "not ordered"
    assert rank.enter(order(), 0.0) and not rank.enter(order(), 0.0)
    rank.hear(told(2, None), 0.0)
    assert rank.advice(0.0) is Advice.LEAVE
    rank.leave()
    rank.hear(told(3, order()), 0.0)
    assert rank.advice(0.0) is Advice.WAIT and not rank.enter(order(), 0.0)
    rank.hear(told(4, order(session=2)), 0.0)
    assert rank.advice(0.0) is Advice.ENTER and rank.enter(order(session=2), 0.0)


def test_a_rank_that_is_not_available_enters_nothing(rank: Follower) -> None:
    rank.withdraw()
    rank.hear(told(1, order()), 0.0)
    assert not rank.enter(order(), 0.0) and not rank.report().available
    rank.rollout_started(1)
    assert rank.hear(told(2, order(), 1), 0.0) and not rank.enter(order(), 0.0)


def test_a_rank_that_left_early_is_unavailable_until_the_coordinator_knows(rank: Follower) -> None:
    rank.hear(told(1, order()), 0.0)
    rank.enter(order(), 0.0)
    rank.withdraw()
    rank.released(0, 3, 4)
    assert not rank.report().available, "else it might never notice, and the others wait for its step"
    rank.hear(told(2, order(2, start=2)), 0.0)
    assert rank.advice(0.0) is Advice.WAIT
    rank.hear(told(3, None), 0.0)
    assert rank.report().available
    rank.hear(told(4, order(3, start=4)), 0.0)
    assert rank.advice(0.0) is Advice.ENTER


def test_a_later_generation_starts_at_its_effective_step(rank: Follower) -> None:
    rank.hear(told(1, order()), 0.0)
    rank.enter(order(), 0.0)
    rank.hear(told(2, order(2, start=2)), 0.0)
    for _ in range(2):
        assert rank.advice(0.0) is Advice.TRAIN
        rank.at_step_boundary(0)
    assert rank.advice(0.0) is Advice.LEAVE
    rank.leave()
    assert rank.report().available and rank.advice(0.0) is Advice.ENTER


def test_an_immediate_generation_interrupts(rank: Follower) -> None:
    rank.hear(told(1, order()), 0.0)
    rank.enter(order(), 0.0)
    rank.hear(told(2, order(2, start=2, at_once=True)), 0.0)
    assert rank.advice(0.0) is Advice.LEAVE


def test_a_silent_coordinator_ends_training(rank: Follower) -> None:
    rank.hear(told(1, order()), 0.0)
    rank.enter(order(), 0.0)
    assert not rank.is_silent(5.0) and rank.advice(5.0) is Advice.TRAIN
    assert rank.is_silent(5.1) and rank.advice(5.1) is Advice.LEAVE
    rank.leave()
    rank.hear(told(2, order()), 6.0)
    assert not rank.is_silent(6.0) and rank.advice(6.0) is Advice.WAIT, "but not entered a second time"


def test_calls_out_of_turn_are_refused(rank: Follower) -> None:
    with pytest.raises(RuntimeError, match="in no session"):
        rank.at_step_boundary(1)
    with pytest.raises(ValueError, match="rl_step is 1; allowed: 0"):
        rank.released(1, 3)
    with pytest.raises(ValueError, match="rl_step is 0; allowed: above 0"):
        rank.rollout_started(0)
    rank.hear(told(1, order()), 0.0)
    rank.enter(order(), 0.0)
    with pytest.raises(RuntimeError, match="still inside"):
        rank.rollout_started(1)
