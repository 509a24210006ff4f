"""A coordinator and its ranks over a perfect network, stepped by the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.follower import Follower
from megatron_tlt.spot.types import Advice, Directive, ReplicaState, Report, SessionOrder

PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
SINGLES = [(0,), (1,), (2,), (3,)]


class World:
    """``deaf`` ranks receive nothing; ``dead`` ranks send nothing either."""

    def __init__(self, replicas: Sequence[Sequence[int]] = SINGLES, steps_ahead: int = 2, **options: Any) -> None:
        settings = {
            "min_replicas": 2,
            "min_entries": 1,
            "heartbeat_s": 1.0,
            "lost_after_s": 4.0,
            "session_timeout_s": 30.0,
            "silent_after_s": 6.0,
            "grace_s": 0.5,
            **options,
        }
        self.config = SpotConfig(**settings)
        self.now = 0.0
        self.coordinator = Coordinator(replicas, self.config, self.now, steps_ahead=steps_ahead)
        self.ranks = {rank: Follower(rank, self.config.silent_after_s, 0.0) for ranks in replicas for rank in ranks}
        self.deaf: set[int] = set()
        self.dead: set[int] = set()
        self.given = 0

    def start(self, rl_step: int = 0) -> None:
        for rank in self.ranks.values():
            if rank.rank not in self.dead:
                rank.rollout_started(rl_step)
        self.say(*self.ranks)

    def say(self, *ranks: int) -> None:
        """These ranks report; each directive is delivered to its rank."""
        for rank in ranks:
            if rank not in self.dead:
                self.handle(self.ranks[rank].report())

    def handle(self, report: Report) -> None:
        self.deliver(self.coordinator.handle(report, self.now))

    def deliver(self, directives: list[Directive]) -> None:
        self.given += len(directives)
        for directive in directives:
            if directive.rank not in self.deaf | self.dead:
                self.ranks[directive.rank].hear(directive, self.now)

    def release(self, *ranks: int, entries: int = 1, version: int = 0) -> None:
        for rank in ranks:
            self.ranks[rank].released(self.ranks[rank].rl_step, entries, version)
            self.say(rank)

    def enter(self, *ranks: int) -> None:
        for rank in ranks:
            order = self.ranks[rank].order
            assert order is not None and self.ranks[rank].enter(order, self.now), f"rank {rank}: {order}"
            self.say(rank)

    def step(self, *ranks: int, version: int = 0) -> None:
        for rank in ranks:
            self.ranks[rank].at_step_boundary(version)
            self.say(rank)

    def leave(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].leave()
            self.say(rank)

    def wait(self, seconds: float) -> None:
        """Advance the time, with heartbeats of all living ranks."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + self.config.heartbeat_s, end)
            self.say(*self.ranks)
            self.deliver(self.coordinator.tick(self.now))

    @property
    def order(self) -> SessionOrder:
        assert self.coordinator.session is not None
        return self.coordinator.session.order


def states(world: World) -> list[ReplicaState]:
    return [world.coordinator.state_of(i) for i in range(4)]


def advice(world: World, *ranks: int) -> list[Advice]:
    return [world.ranks[rank].advice(world.now) for rank in ranks]


def training(*ranks: int, **options: Any) -> World:
    """A world in which these ranks train and have completed step 0."""
    world = World(**options)
    world.start()
    world.release(*ranks[:-1], entries=0)
    world.release(ranks[-1])
    world.enter(*ranks)
    world.step(*ranks, version=1)
    return world
