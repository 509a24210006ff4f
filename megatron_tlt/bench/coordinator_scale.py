"""The coordinator's state machine with very many simulated replicas: its time per report."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_tlt.bench.coordinator_histories import Faults
from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.follower import Follower
from megatron_tlt.spot.types import Advice, Directive, Report

HEARTBEAT_S = 5
STEP_S = 3
"""Duration of a training step; all events occur at whole simulated seconds."""
_SETTLED_AFTER_S = 120


@dataclass
class Load:
    """Load of one simulated rollout: real seconds of each ``handle``, directives, unsettled ranks."""

    seconds: list[float] = field(default_factory=list)
    directives: int = 0
    generations: int = 0
    unsettled: int = 0
    """Ranks that do not know of the rollout's end, or are still in a session, long after it."""


class _Channel:
    """Messages of one direction: those of a second arrive together, or not."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self._faults, self._random = faults, rng
        self._late: list = []

    def carry(self, messages: list) -> list:
        faults, rng = self._faults, self._random
        arriving, self._late = self._late, []
        for message in messages:
            if faults.lost and rng.random() < faults.lost:
                continue
            if faults.duplicated and rng.random() < faults.duplicated:
                arriving.append(message)
            if faults.delayed and rng.random() < faults.delayed:
                self._late.append(message)
            else:
                arriving.append(message)
        if faults.reordered:
            rng.shuffle(arriving)
        return arriving


class _SimulatedRollout:
    def __init__(self, replicas: int, faults: Faults, seed: int) -> None:
        self._random = random.Random(seed)
        self.now = 0
        config = SpotConfig(
            min_replicas=replicas // 10,
            min_entries=1,
            heartbeat_s=HEARTBEAT_S,
            lost_after_s=8 * HEARTBEAT_S,
            silent_after_s=8 * HEARTBEAT_S,
            session_timeout_s=60,
        )
        self.coordinator = Coordinator([(i,) for i in range(replicas)], config, 0.0)
        self.ranks = [Follower(i, config.silent_after_s, 0.0) for i in range(replicas)]
        self.load = Load()
        self._reports = _Channel(faults, self._random)
        self._directives = _Channel(faults, self._random)

    def exchange(self, reporting: Iterable[Follower]) -> None:
        """One second: reports go to the coordinator, directives to the ranks."""
        self.now += 1
        told: list[Directive] = []
        reports: list[Report] = self._reports.carry([rank.report() for rank in reporting])
        for report in reports:
            began = time.perf_counter()
            answers = self.coordinator.handle(report, self.now)
            self.load.seconds.append(time.perf_counter() - began)
            told += answers
        told += self.coordinator.tick(self.now)
        self.load.directives += len(told)
        for directive in self._directives.carry(told):
            self.ranks[directive.rank].hear(directive, self.now)

    def act(self) -> list[Follower]:
        """Ranks that send a report: all with their heartbeats, training ranks at their steps."""
        changed = []
        for rank in self.ranks:
            advice = rank.advice(self.now)
            if advice is Advice.LEAVE:
                rank.leave()
            elif advice is Advice.ENTER and rank.order is not None:
                rank.enter(rank.order, self.now)
            elif advice is Advice.TRAIN and self.now % STEP_S == 0:
                rank.at_step_boundary(self.now)
            elif (rank.rank + self.now) % HEARTBEAT_S:
                continue
            changed.append(rank)
        return changed

    def run(self, seconds: int) -> Load:
        for rank in self.ranks:
            rank.rollout_started(0)
        self.exchange(self.ranks)
        ends = [1 + self._random.randrange(seconds) for _ in self.ranks]
        for second in range(1, seconds + 1):
            for rank, end in zip(self.ranks, ends, strict=True):
                if end == second:
                    rank.released(0, 1)
            self.exchange(self.act())
        limit = self.now + _SETTLED_AFTER_S
        while self.now < limit and self._unsettled():
            self.exchange(self.act())
        self.load.unsettled = self._unsettled()
        self.load.generations = 1 + self.coordinator.counts["further generations"]
        return self.load

    def _unsettled(self) -> int:
        return sum(rank.inside or not rank.rollout_over(0) for rank in self.ranks)


def play_rollout(replicas: int, faults: Faults, seed: int, seconds: int = 40) -> Load:
    """Simulates a rollout of ``seconds`` seconds; replicas of one rank are released one after another and train."""
    return _SimulatedRollout(replicas, faults, seed).run(seconds)
