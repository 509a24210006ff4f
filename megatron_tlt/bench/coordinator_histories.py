"""Random histories of ranks and their coordinator over a bad network, simulated.

Coordinator and ranks are the product's; network, engines and training are events in a queue. The training model covers
only what matters here: a group starts when all members have entered it, and a step ends when all have contributed. So a
member that dies, hangs or leaves blocks the others until they receive a new order.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_tlt.bench.coordinator_rules import History, Rules, SimulatedRank
from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.follower import Follower
from megatron_tlt.spot.types import Advice, Directive, MemberProgress, Report, SessionOrder

LATENCY_S = 0.005
SETTLED_AFTER_S = 40.0
"""Simulated seconds after the last fault within which everything must end."""
_RETRY_S = 0.4


@dataclass(frozen=True)
class Faults:
    """Shares of messages: ``lost``; ``duplicated``; ``reordered``, by up to 0.4 s; ``delayed``, by up to 3 s.

    ``mishaps`` is the share of histories for each kind: a replica dies, a rank hangs in training, a rank is needed
    elsewhere for a while, a rank gives up training, ranks are cut off from the coordinator.
    """

    lost: float = 0.0
    duplicated: float = 0.0
    reordered: float = 0.0
    delayed: float = 0.0
    mishaps: float = 0.0


FAULTS = {
    "none": Faults(),
    "lost": Faults(lost=0.25, mishaps=0.2),
    "duplicated": Faults(duplicated=0.4, mishaps=0.2),
    "reordered": Faults(reordered=0.5, mishaps=0.2),
    "delayed": Faults(delayed=0.2, mishaps=0.2),
    "all": Faults(lost=0.15, duplicated=0.2, reordered=0.3, delayed=0.1, mishaps=0.3),
}


@dataclass(eq=False)
class _Group:
    order: SessionOrder
    inside: set[int] = field(default_factory=set)
    formed: bool = False
    contributed: dict[int, set[int]] = field(default_factory=dict)


class Simulation:
    """One history, a pure function of seed and faults."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.history = History(seed)
        self._faults = faults
        self._random = rng = random.Random(seed)
        width = rng.choice((1, 1, 2))
        count = rng.randint(2, 5 if width == 1 else 3)
        self._replicas = [tuple(range(i * width, (i + 1) * width)) for i in range(count)]
        min_replicas, min_entries, steps_ahead = rng.randint(1, 2), rng.choice((None, 3, 8)), rng.randint(1, 3)
        self.config = SpotConfig(
            min_replicas=min_replicas,
            min_entries=min_entries,
            heartbeat_s=1.0,
            lost_after_s=3.5,
            session_timeout_s=2.0,
            grace_s=0.5,
            preempt_timeout_s=1.0,
            silent_after_s=4.0,
        )
        self.coordinator = Coordinator(self._replicas, self.config, 0.0, steps_ahead=steps_ahead)
        self.ranks = [
            SimulatedRank(number, index, Follower(number, self.config.silent_after_s, 0.0), rng.randint(1, 4))
            for index, ranks in enumerate(self._replicas)
            for number in ranks
        ]
        good = faults == Faults()
        self._rules = Rules(self.history, self.coordinator, self.ranks, count, good=good)
        self._rl_steps = rng.randint(1, 2)
        self._good_from = 0.0 if good else rng.uniform(4.0, 10.0)
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._pushed = 0
        self._groups: dict[tuple[int, int], _Group] = {}
        self._tick_at = float("inf")
        self._ended = False

    def run(self) -> History:
        """Runs until all living ranks know that the last rollout is over, or too much time has passed."""
        for rank in self.ranks:
            self._at(self._random.random() * self.config.heartbeat_s, self._heartbeat, rank)
        self._begin_rollouts(0)
        self._plan_mishaps()
        limit = self._good_from + SETTLED_AFTER_S
        while self._queue and not self._ended:
            self._now, _, action, arguments = heapq.heappop(self._queue)
            self._rules.now = self._now
            if self._now > limit:
                self._rules.violated("it did not settle after the network was good again")
                break
            action(*arguments)
        self.history.counts = self.coordinator.counts
        return self.history

    # Time and network

    def _at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (when, self._pushed, action, arguments))

    def _travel(self, rank: SimulatedRank, deliver: Callable[..., None], *message: object) -> None:
        """Delivers a message from or to a rank: once, never, twice, or late."""
        faults, rng = self._faults, self._random
        latency = LATENCY_S
        if self._now < self._good_from:
            if self._now < rank.cut_off_until or rng.random() < faults.lost:
                return
            if rng.random() < faults.duplicated:
                self._at(self._now + latency + rng.random() * 2, deliver, *message)
            if rng.random() < faults.reordered:
                latency += rng.random() * 0.4
            if rng.random() < faults.delayed:
                latency += rng.random() * 3
        self._at(self._now + latency, deliver, *message)

    def _send(self, rank: SimulatedRank) -> None:
        self._travel(rank, self._arrived, rank.follower.report())

    def _arrived(self, report: Report) -> None:
        self.history.reports += 1
        self._give_out(self.coordinator.handle(report, self._now))

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self._give_out(self.coordinator.tick(self._now))

    def _give_out(self, directives: list[Directive]) -> None:
        self._rules.decided()
        for directive in directives:
            rank = self.ranks[directive.rank]
            self._travel(rank, self._hears, rank, directive)
        deadline = self.coordinator.next_deadline()
        if deadline < self._tick_at:
            self._tick_at = deadline
            self._at(max(deadline, self._now), self._tick)

    # A rank

    def _heartbeat(self, rank: SimulatedRank) -> None:
        if rank.dead:
            return
        self._send(rank)
        self._act(rank)
        self._rules.watch()
        self._ended = self._finished()
        self._at(self._now + self.config.heartbeat_s, self._heartbeat, rank)

    def _hears(self, rank: SimulatedRank, directive: Directive) -> None:
        if rank.dead:
            return
        news = rank.follower.hear(directive, self._now)
        self._rules.heard(rank, directive)
        if news:
            self._act(rank)

    def _act(self, rank: SimulatedRank) -> None:
        """The loop of a released rank, like the trainer's."""
        follower = rank.follower
        if rank.busy or rank.done or rank.dead or self._now < rank.hangs_until:
            return
        changed = False
        advice = follower.advice(self._now)
        if advice is Advice.LEAVE:
            self._leave(rank)
            changed = True
            advice = follower.advice(self._now)
        if not follower.inside and (follower.rollout_over(follower.rl_step) or follower.is_silent(self._now)):
            rank.done = True
            self._check_all_done()
        elif advice is Advice.ENTER:
            self._enter(rank)
            changed = True
        elif advice is Advice.TRAIN and rank.computes != follower.place:
            place = follower.place
            assert place is not None
            if self._groups[place.session, place.generation].formed:
                rank.computes = place
                self._at(self._now + 0.1 + 0.1 * self._random.random(), self._contribute, rank, place)
        if changed:
            self._send(rank)

    def _enter(self, rank: SimulatedRank) -> None:
        order = rank.follower.order
        if order is None or not rank.follower.enter(order, self._now):
            return
        self._rules.entered(rank, order)
        group = self._groups.setdefault((order.session, order.generation), _Group(order))
        group.inside.add(rank.number)
        if len(group.inside) == len(group.order.members):
            group.formed = True
            for number in group.order.members:
                self.ranks[number].version = self.ranks[order.leader].version
                self._at(self._now, self._act, self.ranks[number])

    def _leave(self, rank: SimulatedRank) -> None:
        place = rank.follower.place
        assert place is not None
        self._groups[place.session, place.generation].inside.discard(rank.number)
        rank.follower.leave()
        rank.left, rank.computes = place, None

    def _contribute(self, rank: SimulatedRank, place: MemberProgress) -> None:
        if rank.dead or rank.follower.place != place or self._now < rank.hangs_until:
            return
        group = self._groups[place.session, place.generation]
        contributed = group.contributed.setdefault(place.step, set())
        contributed.add(rank.number)
        if len(contributed) < len(group.order.members):
            return
        self.history.steps += 1
        self._rules.trained(place)
        for number in sorted(group.inside):
            member = self.ranks[number]
            if member.dead or self._now < member.hangs_until or member.follower.place != place:
                continue
            member.version += 1
            member.follower.at_step_boundary(member.version)
            self._send(member)
            self._act(member)

    # RL steps

    def _begin_rollouts(self, rl_step: int) -> None:
        slowest = self._random.randrange(len(self._replicas))
        for rank in self.ranks:
            if rank.dead:
                continue
            if rank.follower.inside:
                self._rules.violated(f"rank {rank.number} is inside a session when rollout {rl_step} is to start")
                self._leave(rank)
            rank.follower.rollout_started(rl_step)
            rank.busy, rank.done, rank.free_since = True, False, None
            # the long tail: one replica takes longer
            took = 0.2 + self._random.random() * (7 if rank.replica == slowest else 2.5)
            self._at(self._now + took, self._finish, rank, rl_step)
            self._send(rank)

    def _finish(self, rank: SimulatedRank, rl_step: int) -> None:
        if rank.dead:
            return
        rank.busy, rank.free_since = False, self._now
        rank.follower.released(rl_step, rank.entries, rank.version)
        self._send(rank)
        self._act(rank)

    def _check_all_done(self) -> None:
        if all(rank.dead or rank.done for rank in self.ranks):
            self._at(self._now + 0.2, self._next_rl_step, max(rank.follower.rl_step for rank in self.ranks) + 1)

    def _next_rl_step(self, rl_step: int) -> None:
        if rl_step < self._rl_steps and all(rank.follower.rl_step < rl_step for rank in self.ranks):
            self._begin_rollouts(rl_step)

    def _finished(self) -> bool:
        last = self._rl_steps - 1
        return self._now >= self._good_from and all(
            rank.dead or (rank.done and rank.follower.rl_step == last and rank.follower.rollout_over(last))
            for rank in self.ranks
        )

    # Mishaps

    def _plan_mishaps(self) -> None:
        rng = self._random
        chosen, begin = rng.choice(self.ranks), [rng.random() * self._good_from for _ in range(5)]
        strikes = [rng.random() < self._faults.mishaps for _ in range(5)]
        if strikes[0]:
            self._at(begin[0], self._kill, rng.randrange(len(self._replicas)))
        if strikes[1]:
            self._at(begin[1], self._hang, rng.choice(self.ranks), rng.uniform(1.0, 9.0))
        if strikes[2]:
            self._at(begin[2], self._withdraw, chosen)
        if strikes[3]:
            self._at(begin[3], self._give_up, rng.choice(self.ranks))
        if strikes[4]:
            cut_off = self.ranks if rng.random() < 0.4 else [rng.choice(self.ranks)]
            self._at(begin[4], self._cut_off, cut_off, rng.uniform(1.0, 8.0))

    def _kill(self, replica: int) -> None:
        for number in self._replicas[replica]:
            self.ranks[number].dead = True
        self._check_all_done()

    def _hang(self, rank: SimulatedRank, duration: float) -> None:
        if rank.follower.inside:
            rank.hangs_until = self._now + duration
            self._at(rank.hangs_until, self._act, rank)
        elif self._now < self._good_from:
            self._at(self._now + _RETRY_S, self._hang, rank, duration)

    def _withdraw(self, rank: SimulatedRank) -> None:
        if not rank.follower.inside or rank.dead or self._now < rank.hangs_until:
            if self._now < self._good_from:
                self._at(self._now + _RETRY_S, self._withdraw, rank)
            return
        self._leave(rank)
        rank.follower.withdraw()
        rank.free_since = None
        self._send(rank)
        self._at(self._now + 3 * self._random.random(), self._come_back, rank, rank.follower.rl_step)

    def _come_back(self, rank: SimulatedRank, rl_step: int) -> None:
        if not (rank.dead or rank.done) and rank.follower.rl_step == rl_step:
            self._finish(rank, rl_step)

    def _give_up(self, rank: SimulatedRank) -> None:
        if rank.follower.inside and not rank.dead and self._now >= rank.hangs_until:
            self._leave(rank)
            rank.free_since = None
            self._send(rank)
        elif self._now < self._good_from:
            self._at(self._now + _RETRY_S, self._give_up, rank)

    def _cut_off(self, ranks: list[SimulatedRank], duration: float) -> None:
        for rank in ranks:
            rank.cut_off_until = self._now + duration


def run_history(seed: int, faults: Faults) -> History:
    """The history of this seed."""
    return Simulation(seed, faults).run()
