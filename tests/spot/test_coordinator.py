"""The coordinator's rules, one test per rule; test_histories has random histories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.types import Advice, MemberProgress, ReplicaState, Report
from tests.spot.world import PAIRS, World, advice, states, training

BUSY, IDLE, TRAINING, LOST = ReplicaState.BUSY, ReplicaState.IDLE, ReplicaState.TRAINING, ReplicaState.LOST


def test_a_replica_is_released_when_all_of_its_ranks_are() -> None:
    world = World(PAIRS, min_replicas=1)
    world.start()
    world.release(0)
    assert states(world)[0] is BUSY and world.coordinator.session is None
    world.release(1)
    assert world.order.members == (0, 1) and states(world) == [TRAINING, BUSY, BUSY, BUSY]


def test_a_session_starts_with_enough_replicas_and_enough_entries() -> None:
    world = World(min_replicas=2, min_entries=10)
    world.start()
    world.release(3, entries=9)
    assert world.coordinator.session is None, "one replica"
    world.release(1, entries=0)
    assert world.coordinator.session is None and states(world) == [BUSY, IDLE, BUSY, IDLE], "nine entries"
    world.release(1, entries=1)
    assert world.order.members == (1, 3) and world.order.name == "spot/0/1/1"
    assert advice(world, 0, 1, 2, 3) == [Advice.WAIT, Advice.ENTER, Advice.WAIT, Advice.ENTER]


@pytest.mark.parametrize(
    ("versions", "leader"),
    [((5, 7, 6), 1), ((5, 7, 7), 2), ((0, 0, 0), 2)],
    ids=["newest drafter", "longest in service among these", "longest in service"],
)
def test_the_newest_drafter_leads_then_the_longest_idle(versions: tuple[int, ...], leader: int) -> None:
    world = World(min_replicas=3)
    world.start()
    for rank in (2, 1, 0):
        world.now += 1
        world.release(rank, version=versions[rank])
    assert world.order.members == (0, 1, 2) and world.order.leader == leader


def test_the_lowest_rank_leads_among_equals() -> None:
    world = World(PAIRS, min_replicas=2)
    world.start()
    world.release(6, 7, 2, 3)
    assert world.order.leader == 2


def test_late_replicas_join_at_the_first_step_not_yet_granted() -> None:
    world = training(0, 1)
    assert world.order.until_step == 3
    world.release(2)
    assert world.order.generation == 1, "only at a step boundary"
    world.step(0)
    assert world.order.generation == 1, "of all members"
    world.step(1)
    order = world.order
    assert (order.generation, order.members, order.leader, order.at_once) == (2, (0, 1, 2), 0, False)
    assert order.effective_step == 4, "the first step that was not granted yet"
    assert advice(world, 0, 1, 2) == [Advice.TRAIN, Advice.TRAIN, Advice.ENTER]
    world.enter(2)
    world.step(0, 1)
    assert advice(world, 0, 1) == [Advice.TRAIN, Advice.TRAIN], "step 3 is of the generation before"
    world.step(0, 1)
    assert advice(world, 0, 1) == [Advice.LEAVE, Advice.LEAVE]
    world.leave(0, 1)
    world.enter(0, 1)
    assert advice(world, 0, 1, 2) == [Advice.TRAIN] * 3
    assert {world.ranks[rank].place.step for rank in (0, 1, 2)} == {4}  # type: ignore[union-attr]


def test_a_session_grows_only_after_all_entered_its_newest_generation() -> None:
    world = training(0, 1, replicas=[(i,) for i in range(5)])
    world.release(2)
    world.step(0, 1)
    world.release(3)
    assert world.order.generation == 2
    world.step(0, 1)
    world.step(0, 1)
    world.leave(0, 1)
    world.enter(0, 1)
    assert world.order.generation == 2, "rank 2 may not even have heard of it"
    world.enter(2)
    assert world.order.generation == 3 and world.order.members == (0, 1, 2, 3)


def test_members_wait_at_until_step_and_are_notified_when_it_advances() -> None:
    world = training(0, 1, steps_ahead=1)
    assert advice(world, 0, 1) == [Advice.TRAIN, Advice.TRAIN], "rank 0 was told when rank 1 had caught up"
    world.step(0)
    assert advice(world, 0) == [Advice.WAIT]
    world.step(1)
    assert advice(world, 0, 1) == [Advice.TRAIN, Advice.TRAIN]


def test_a_session_continues_until_the_last_rollout_ends() -> None:
    world = training(0, 1)
    world.release(2)
    assert advice(world, 0, 1) == [Advice.TRAIN, Advice.TRAIN], "one worker's end is not the rollout's"
    assert not any(rank.rollout_over(0) for rank in world.ranks.values())
    world.release(3)
    assert world.coordinator.session is None
    assert all(rank.rollout_over(0) for rank in world.ranks.values())
    assert advice(world, 0, 1, 2, 3) == [Advice.LEAVE, Advice.LEAVE, Advice.WAIT, Advice.WAIT]


def test_a_withdrawn_replica_leaves_and_the_others_continue_at_once() -> None:
    world = training(0, 1, 2)
    world.ranks[0].withdraw()
    world.say(0)
    order = world.order
    assert (order.generation, order.members, order.at_once) == (2, (1, 2), True)
    assert order.leader == 1, "the one with the newest drafter, longest in service"
    assert order.effective_step == 3, "steps that somebody may have trained are not counted again"
    assert advice(world, 0, 1, 2) == [Advice.WAIT, Advice.LEAVE, Advice.LEAVE]
    world.say(0)
    assert states(world) == [IDLE, TRAINING, TRAINING, BUSY]


def test_a_withdrawn_replica_may_join_again() -> None:
    world = training(0, 1, 2)
    world.ranks[0].withdraw()
    world.say(0, 0)
    world.leave(1, 2)
    world.enter(1, 2)
    world.step(1, 2)
    assert world.order.members == (1, 2)
    world.release(0)
    world.step(1, 2)
    assert world.order.members == (0, 1, 2) and advice(world, 0) == [Advice.ENTER]


def test_a_session_ends_below_min_replicas() -> None:
    world = training(0, 1)
    world.ranks[0].withdraw()
    world.say(0)
    assert world.coordinator.session is None and advice(world, 1) == [Advice.LEAVE]
    assert states(world)[1] is TRAINING, "until it says that it has left"
    world.leave(1)
    assert states(world)[1] is IDLE


def test_leaving_without_an_order_is_a_withdrawal() -> None:
    world = training(0, 1, 2)
    world.leave(2)
    assert world.order.members == (0, 1) and world.order.at_once
    world.wait(20)
    assert world.order.members == (0, 1), "whatever drove it out would do so again"


def test_a_lost_replica_is_removed_and_replaced_as_leader() -> None:
    world = training(0, 1, 2)
    world.dead = {0}
    world.wait(3)
    assert world.order.members == (0, 1, 2)
    world.wait(2)
    assert world.order.members == (1, 2) and world.order.leader == 1 and world.order.at_once
    assert states(world) == [LOST, TRAINING, TRAINING, BUSY] and world.coordinator.counts["replicas lost"] == 1


def test_one_lost_rank_is_a_lost_replica() -> None:
    world = World(PAIRS, min_replicas=1)
    world.start()
    world.dead = {3}
    world.wait(5)
    assert states(world) == [BUSY, LOST, BUSY, BUSY]


def test_the_rollout_ends_when_all_living_replicas_are_released() -> None:
    world = World()
    world.start()
    world.release(0, 1, 2)
    world.dead = {3}
    assert not world.ranks[0].rollout_over(0)
    world.wait(5)
    assert all(world.ranks[rank].rollout_over(0) for rank in (0, 1, 2))


def test_a_rollout_without_a_living_replica_is_not_over() -> None:
    world = World()
    world.start()
    world.dead = {0, 1, 2, 3}
    world.wait(10)
    assert states(world) == [LOST] * 4 and not world.coordinator.rollout_over


def test_a_lost_replica_that_comes_back_joins_again_once_it_has_left() -> None:
    world = training(0, 1, 2)
    world.dead = {2}
    world.wait(5)
    world.leave(0, 1)
    world.enter(0, 1)
    world.dead = set()
    world.say(2)
    assert world.order.members == (0, 1) and states(world)[2] is TRAINING, "in the generation before, as far as known"
    assert advice(world, 2) == [Advice.LEAVE]
    world.leave(2)
    world.step(0, 1)
    assert world.order.members == (0, 1, 2)


def test_a_release_does_not_carry_over_to_the_next_rl_step() -> None:
    world = World()
    world.start(0)
    world.release(0, 1, 2, 3)
    late = {3}
    for rank in {0, 1, 2, 3} - late:
        world.ranks[rank].rollout_started(1)
        world.say(rank)
    world.release(0, 1, 2)
    assert not world.coordinator.rollout_over and states(world)[3] is BUSY
    assert world.order.members == (0, 1)


def test_the_next_rl_step_ends_the_previous_session() -> None:
    world = training(0, 1)
    for rank in (2, 3):
        world.ranks[rank].rollout_started(1)
    world.say(2)
    assert world.coordinator.session is None and world.coordinator.rl_step == 1
    assert world.ranks[0].rollout_over(0) and advice(world, 0, 1) == [Advice.LEAVE, Advice.LEAVE]


def test_reports_that_are_not_newer_are_ignored() -> None:
    world = World()
    world.start()
    before = world.ranks[0].report()
    world.release(0, 1)
    given = world.given
    world.handle(before)
    world.handle(before)
    assert world.order.members == (0, 1) and world.given == given
    assert world.coordinator.counts["reports replayed"] == 2


def test_a_replayed_report_does_not_count_as_a_heartbeat() -> None:
    world = World()
    world.start()
    recorded = world.ranks[0].report()
    world.handle(recorded)
    world.dead = {0}
    for _ in range(6):
        world.wait(1)
        world.handle(recorded)
    assert states(world)[0] is LOST


def test_reports_of_unknown_ranks_are_ignored() -> None:
    world = World()
    assert world.coordinator.handle(Report(9, 1, 0, True, True, 1, 0, None, -1), 0.0) == []
    assert world.coordinator.counts["reports of unknown ranks"] == 1 and world.coordinator.rl_step == -1


def test_steps_of_another_session_do_not_count() -> None:
    world = training(0, 1)
    for rank in (0, 1):
        world.handle(replace(world.ranks[rank].report(), place=MemberProgress(9, 1, 3)))
    assert world.order.until_step == 3


def test_a_report_from_before_the_order_acknowledges_no_stop() -> None:
    world = World()
    world.start()
    world.release(0)
    world.deaf = {0}
    before = world.ranks[0].report()  # not in a session, but sent before it received the order
    world.release(1)
    world.ranks[1].withdraw()
    world.say(1)
    assert world.coordinator.session is None
    world.handle(before)
    assert states(world)[0] is TRAINING, "it may be entering right now"
    world.deaf = set()
    world.say(0)
    assert states(world)[0] is TRAINING
    world.say(0)
    assert states(world)[0] is IDLE, "having heard the stop, it enters no more"


def test_every_accepted_report_is_answered() -> None:
    world = World()
    for rank in world.ranks.values():
        directives = world.coordinator.handle(rank.report(), 0.0)
        assert [d.rank for d in directives] == [rank.rank] and directives[0].rollout_over


def test_the_number_of_directives_per_report_is_bounded_at_any_size() -> None:
    """Complete-state messages need no more directives than a protocol of changes: a constant number per report."""
    replicas = [(i,) for i in range(2000)]
    world = World(replicas, lost_after_s=1e6)
    world.start()
    for rank in range(1999):
        world.release(rank)
        if rank % 100 == 99:
            members = world.order.members
            for number in members:
                if world.ranks[number].advice(0.0) is Advice.LEAVE:
                    world.leave(number)
            inside = [number for number in members if world.ranks[number].advice(0.0) is Advice.ENTER]
            world.enter(*inside)
            for _ in range(2):
                world.step(*(n for n in members if world.ranks[n].advice(0.0) is Advice.TRAIN))
    world.release(1999)
    assert all(rank.rollout_over(0) for rank in world.ranks.values())
    reports = sum(rank.report().sequence for rank in world.ranks.values())
    assert world.coordinator.counts["further generations"] >= 5
    assert world.given <= 3 * reports


@pytest.mark.parametrize(("replicas", "said"), [([], "no replicas"), ([()], "no ranks"), ([(0,), (0,)], "rank 0 is")])
def test_inconsistent_replicas_are_refused(replicas: list[tuple[int, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*allowed"):
        Coordinator(replicas, SpotConfig(), 0.0)
