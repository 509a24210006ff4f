"""Session timeouts: which replicas are excluded, and for how long."""

from __future__ import annotations

from megatron_tlt.spot.types import Advice, ReplicaState
from tests.spot.world import World, advice, states, training

TRAINING = ReplicaState.TRAINING


def test_a_stuck_session_ends_and_its_slowest_replica_is_excluded() -> None:
    world = training(0, 1, 2, session_timeout_s=8.0, preempt_timeout_s=2.0)
    world.step(0, 1)
    world.wait(7)
    assert world.coordinator.session is not None
    world.wait(2)
    assert advice(world, 0, 1, 2) == [Advice.LEAVE] * 3 and world.coordinator.counts["sessions cut off"] == 1
    world.leave(0, 1, 2)
    assert world.coordinator.is_excluded(2)
    world.release(0, 1)
    world.wait(3)
    assert world.order.members == (0, 1), "the others train again"


def test_progress_postpones_the_session_timeout() -> None:
    world = training(0, 1, session_timeout_s=8.0)
    for _ in range(5):
        world.wait(6)
        world.step(0, 1)
    assert world.order.session == 1


def test_a_replica_that_never_enters_is_excluded() -> None:
    world = World(session_timeout_s=8.0)
    world.start()
    world.release(0, 1)
    world.enter(0)
    world.wait(9)
    assert not world.coordinator.is_excluded(0) and world.coordinator.is_excluded(1)


def test_of_members_at_the_same_step_the_one_that_does_not_leave_is_excluded() -> None:
    world = training(0, 1, 2, session_timeout_s=8.0, preempt_timeout_s=2.0)
    world.wait(9)
    world.leave(0, 1)
    world.release(0, 1)
    world.wait(3)
    assert [world.coordinator.is_excluded(i) for i in range(3)] == [False, False, True]
    assert world.order.members == (0, 1) and states(world)[2] is TRAINING


def test_members_at_the_same_step_that_all_leave_are_all_excluded() -> None:
    world = training(0, 1, session_timeout_s=8.0, preempt_timeout_s=2.0)
    world.wait(9)
    world.leave(0, 1)
    world.wait(5)
    assert world.coordinator.session is None
    assert world.coordinator.is_excluded(0) and world.coordinator.is_excluded(1)


def test_a_replica_that_ignores_a_stop_is_excluded_for_the_rl_step() -> None:
    world = training(0, 1, preempt_timeout_s=3.0)
    world.ranks[0].withdraw()
    world.say(0)
    world.wait(2)
    assert not world.coordinator.is_excluded(1)
    world.wait(2)
    assert world.coordinator.is_excluded(1) and not world.coordinator.is_excluded(0)
    world.leave(1)
    world.release(0, 2)
    assert world.order.members == (0, 2), "its having left changes nothing in this RL step"
    world.release(1, 3)
    world.leave(0, 2)
    world.start(1)
    assert not world.coordinator.is_excluded(1)
    world.release(0, 1)
    assert world.order.members == (0, 1)
