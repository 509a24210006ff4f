"""Decides which ranks train the drafter while the longest responses decode: reports in, directives out.

A pure state machine without sockets, threads or clocks. A replica is idle once all its ranks are released. Enough idle
replicas with enough data form a session, which ends when the last rollout ends. There is at most one session, since
there is one drafter. TLT's public code ends a session when any worker completes; here only the last one ends it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.spot.session import Session
from megatron_tlt.spot.types import NO_RL_STEP, Directive, ReplicaState, Report


class _Alarm(IntEnum):
    """Purpose of a deadline, with its number's meaning in brackets."""

    LOST = 0  # [rank] heartbeat missing
    STUCK = 1  # [session] no step completed
    STOP = 2  # [sequence of the directive] ranks that have not left since then hang


@dataclass(slots=True, eq=False)
class _Rank:
    rank: int
    replica: _Replica
    heard_at: float
    sequence: int = -1
    report: Report | None = None
    lost: bool = False
    stop: int | None = None
    """Sequence number of the first directive that ordered the rank to leave, until it has left."""


@dataclass(slots=True, eq=False)
class _Replica:
    index: int
    ranks: list[_Rank] = field(default_factory=list)
    lost: bool = False
    released: bool = False
    idle_since: float | None = None
    """When it became free to train; None if it is not free."""
    num_entries: int = 0
    excluded: bool = False
    """Whether it is excluded from sessions for the rest of this RL step."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(rank.rank for rank in self.ranks)


class Coordinator:
    """Call ``handle`` for each report and ``tick`` at ``next_deadline``; both return the directives to send.

    A rank gets a directive whenever its order changes, and in answer to each of its reports. So no message needs
    acknowledgement or retransmission, and the current state is the only memory. Reports older than a rank's newest one
    are ignored. ``now`` is in seconds of any monotonic clock.

    Handling a report costs O(ranks of a replica), plus O(log ranks) if it sets a deadline. Events for all members (a
    new generation, an end) or all ranks (a new RL step, the end of its rollout) cost one directive each. A session
    grows only after all its members have reported, so that is O(1) per report too.

    Args:
        replicas: the ranks of each engine.
        config: without ``min_replicas`` or ``min_entries``, any idle replica starts a session.
        first_sequence: above all sequence numbers of directives that these ranks received before.
        steps_ahead: steps that members may train beyond what all have reported; with 2 they need not wait.

    Raises:
        ValueError: no replica, a replica without ranks, or a duplicate rank.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[int]],
        config: SpotConfig,
        now: float,
        first_sequence: int = 0,
        steps_ahead: int = 2,
    ) -> None:
        self.config = config
        self.min_replicas, self.min_entries = config.min_replicas or 1, config.min_entries or 0
        self._steps_ahead = steps_ahead
        self.rl_step = NO_RL_STEP
        self.rollout_over = True
        self.counts: Counter[str] = Counter()
        """Event counts by name: sessions, generations, lost replicas, ignored reports by reason."""
        self._sequence = first_sequence
        self._session: Session | None = None
        self._sessions = 0
        self._replicas = [_Replica(index) for index in range(len(replicas))]
        self._ranks: dict[int, _Rank] = {}
        self._alarms: list[tuple[float, _Alarm, int]] = []
        self._stopped: dict[int, tuple[list[_Replica], list[_Replica]]] = {}
        self._living, self._released, self._entries = len(replicas), 0, 0
        self._idle: dict[_Replica, None] = {}
        self._to_tell: dict[int, _Rank] = {}
        for replica, ranks in zip(self._replicas, replicas, strict=True):
            if not ranks:
                raise ValueError(f"replica {replica.index} has no ranks; allowed: 1 and more")
            for number in ranks:
                if number in self._ranks:
                    raise ValueError(f"rank {number} is listed twice; allowed: once, in one replica")
                rank = self._ranks[number] = _Rank(number, replica, now)
                replica.ranks.append(rank)
                self._alarm(now + config.lost_after_s, _Alarm.LOST, number)
        if not replicas:
            raise ValueError("there are no replicas; allowed: 1 and more")

    # Events

    def handle(self, report: Report, now: float) -> list[Directive]:
        """Process a report. Unless it is ignored, the directives include an answer to its sender."""
        rank = self._ranks.get(report.rank)
        if rank is None:
            self.counts["reports of unknown ranks"] += 1
            return []
        if report.sequence <= rank.sequence:
            self.counts["reports replayed"] += 1
            return []
        rank.sequence, rank.report, rank.heard_at = report.sequence, report, now
        if report.rl_step > self.rl_step:
            self._begin_rl_step(report.rl_step, now)
        if rank.lost:
            rank.lost = False
            self.counts["ranks that came back"] += 1
            self._alarm(now + self.config.lost_after_s, _Alarm.LOST, rank.rank)
        if rank.stop is not None and report.heard >= rank.stop and report.place is None:
            rank.stop = None
        self._refresh(rank.replica, now)
        self._follow(rank, report, now)
        self._decide(now)
        self._to_tell[rank.rank] = rank
        return self._directives()

    def tick(self, now: float) -> list[Directive]:
        """Process expired deadlines. Handle all received reports first."""
        lost: list[_Replica] = []
        while self._alarms and self._alarms[0][0] <= now:
            _, kind, number = heapq.heappop(self._alarms)
            if kind is _Alarm.LOST:
                lost += self._check_heartbeat(self._ranks[number], now)
            elif kind is _Alarm.STUCK:
                self._check_progress(number, now)
            else:
                self._check_stopped(number, now)
        self._remove(lost, now)
        self._decide(now)
        return self._directives()

    def next_deadline(self) -> float:
        """Time of the next deadline, at which to call ``tick``."""
        return self._alarms[0][0] if self._alarms else float("inf")

    # State

    @property
    def session(self) -> Session | None:
        """The current session, if any."""
        return self._session

    def state_of(self, replica: int) -> ReplicaState:
        """State of the replica with this index."""
        found = self._replicas[replica]
        if found.lost:
            return ReplicaState.LOST
        if self._is_member(found) or any(rank.stop is not None for rank in found.ranks):
            return ReplicaState.TRAINING
        return ReplicaState.IDLE if found.released else ReplicaState.BUSY

    def is_excluded(self, replica: int) -> bool:
        """Whether the replica is excluded from sessions for the rest of this RL step."""
        return self._replicas[replica].excluded

    def _is_member(self, replica: _Replica) -> bool:
        return self._session is not None and replica.index in self._session.replicas

    # Rules

    def _begin_rl_step(self, rl_step: int, now: float) -> None:
        """Start an RL step once any rank has entered it; the previous one is then over for all ranks."""
        self._end_session("ended by the next RL step", now)
        self.rl_step, self.rollout_over = rl_step, False
        for replica in self._replicas:
            replica.excluded = False
            self._refresh(replica, now)

    def _follow(self, rank: _Rank, report: Report, now: float) -> None:
        """Apply a member's report to the session."""
        session, replica, place = self._session, rank.replica, report.place
        if session is None or replica.index not in session.replicas:
            return
        if not (report.released and report.available):
            self.counts["replicas withdrawn"] += 1
            self._remove([replica], now)
        elif place is not None and place.session == session.number and session.advance(rank.rank, place):
            session.deadline = now + self.config.session_timeout_s
            self._to_tell.update((number, self._ranks[number]) for number in session.take_freed())
            self._enlarge(now)

    def _decide(self, now: float) -> None:
        """End the rollout or start a session if the conditions hold."""
        if self.rollout_over:
            return
        if self._living and self._released == self._living:
            self._end_session("ended by the rollout's end", now)
            self.rollout_over = True
            self._to_tell.update(self._ranks)
        elif self._session is None and len(self._idle) >= self.min_replicas and self._entries >= self.min_entries:
            self._start_session(now)

    def _start_session(self, now: float) -> None:
        members = list(self._idle)
        self._sessions += 1
        self.counts["sessions"] += 1
        leader = self._elect(members)
        grouped = {replica.index: replica.numbers for replica in members}
        session = Session(self._sessions, self.rl_step, grouped, leader, self._steps_ahead, now)
        session.deadline = now + self.config.session_timeout_s
        self._session = session
        self._alarm(session.deadline, _Alarm.STUCK, session.number)
        for replica in members:
            self._refresh(replica, now)
            self._tell(replica)

    def _enlarge(self, now: float) -> None:
        """Add idle replicas from a later step on, once all members have entered the newest generation."""
        session = self._session
        if session is not None and session.settled and self._idle:
            self._regroup([*self._members(session), *self._idle], now, at_once=False)

    def _remove(self, replicas: Iterable[_Replica], now: float) -> None:
        """Remove members; the others continue without them, or the session ends."""
        session = self._session
        gone = dict.fromkeys(replica for replica in replicas if self._is_member(replica))
        if session is None or not gone:
            return
        remaining = [replica for replica in self._members(session) if replica not in gone]
        if len(remaining) < self.min_replicas:
            self._end_session("ended for want of replicas", now)
        else:
            self._regroup(remaining, now, at_once=True)
            self._stop(gone, [], now)

    def _regroup(self, members: Sequence[_Replica], now: float, *, at_once: bool) -> None:
        session = self._session
        assert session is not None
        self.counts["further generations"] += 1
        leader = session.order.leader
        if self._ranks[leader].replica not in members:
            leader = self._elect(members)
        session.regroup({replica.index: replica.numbers for replica in members}, leader, at_once=at_once)
        session.deadline = now + self.config.session_timeout_s
        for replica in members:
            self._refresh(replica, now)
            self._tell(replica)

    def _end_session(self, why: str, now: float, suspects: Sequence[_Replica] = ()) -> None:
        session = self._session
        if session is None:
            return
        self.counts[f"sessions {why}"] += 1
        members = self._members(session)
        self._session = None
        self._stop(members, suspects, now)

    def _stop(self, replicas: Iterable[_Replica], suspects: Iterable[_Replica], now: float) -> None:
        """Order replicas to leave; ``suspects`` are excluded unless others turn out to hang."""
        sequence = self._sequence + 1
        for replica in suspects:
            replica.excluded = True
        for replica in replicas:
            for rank in replica.ranks:
                rank.stop = sequence
            self._refresh(replica, now)
            self._tell(replica)
        # one entry even if several stops precede the same directive
        stopped, suspected = self._stopped.setdefault(sequence, ([], []))
        stopped += replicas
        suspected += suspects
        self._alarm(now + self.config.preempt_timeout_s, _Alarm.STOP, sequence)

    def _elect(self, replicas: Iterable[_Replica]) -> int:
        """Rank whose drafter is broadcast: highest version, then longest idle, then lowest replica index."""

        def order(replica: _Replica) -> tuple[int, float, int]:
            report = replica.ranks[0].report
            assert report is not None and replica.idle_since is not None
            return -report.drafter_version, replica.idle_since, replica.index

        return min(replicas, key=order).ranks[0].rank

    # Deadlines

    def _check_heartbeat(self, rank: _Rank, now: float) -> list[_Replica]:
        """The rank's replica, if the rank's heartbeat is missing and the replica is therefore lost."""
        due = rank.heard_at + self.config.lost_after_s
        if due > now:
            self._alarm(due, _Alarm.LOST, rank.rank)
            return []
        rank.lost = True
        if rank.replica.lost:
            return []
        self.counts["replicas lost"] += 1
        self._refresh(rank.replica, now)
        return [rank.replica]

    def _check_progress(self, number: int, now: float) -> None:
        session = self._session
        if session is None or session.number != number:
            return
        if session.deadline > now:
            self._alarm(session.deadline, _Alarm.STUCK, number)
            return
        self._end_session("cut off", now, [self._replicas[index] for index in session.behind()])

    def _check_stopped(self, sequence: int, now: float) -> None:
        """Exclude the replicas that were ordered to leave and have not; suspects that left are then cleared."""
        if sequence not in self._stopped:
            return
        stopped, suspects = self._stopped.pop(sequence)
        hanging = [r for r in stopped if not r.lost and any(rank.stop == sequence for rank in r.ranks)]
        if hanging:
            for replica in suspects:
                replica.excluded = False
        for replica in hanging:
            replica.excluded = True
        if hanging or suspects:
            self.counts["replicas excluded"] += len(hanging or suspects)
        for replica in stopped:
            self._refresh(replica, now)

    def _alarm(self, when: float, kind: _Alarm, number: int) -> None:
        heapq.heappush(self._alarms, (when, kind, number))

    # Bookkeeping

    def _members(self, session: Session) -> list[_Replica]:
        return [self._replicas[index] for index in session.replicas]

    def _refresh(self, replica: _Replica, now: float) -> None:
        """Update a replica's state from its ranks' reports, and the totals over all replicas."""
        lost, released, available, left, entries = False, True, not replica.excluded, True, 0
        for rank in replica.ranks:
            lost, left, report = lost or rank.lost, left and rank.stop is None, rank.report
            if report is None or report.rl_step != self.rl_step or not report.released:
                released = False
            else:
                available = available and report.available
                entries += report.num_entries
        released = released and not lost
        free = released and available
        self._living += replica.lost - lost
        self._released += released - replica.released
        replica.lost, replica.released = lost, released
        if not free:
            replica.idle_since = None
        elif replica.idle_since is None:
            replica.idle_since = now
        if replica in self._idle:
            self._entries -= replica.num_entries
            del self._idle[replica]
        if free and left and not self._is_member(replica):
            self._idle[replica] = None
            replica.num_entries = entries
            self._entries += entries

    def _tell(self, replica: _Replica) -> None:
        for rank in replica.ranks:
            self._to_tell[rank.rank] = rank

    def _directives(self) -> list[Directive]:
        """Directives for the ranks to notify; ranks that have not reported yet must report first."""
        told = [self._directive(rank, rank.report) for rank in self._to_tell.values() if rank.report is not None]
        self._to_tell.clear()
        return told

    def _directive(self, rank: _Rank, report: Report) -> Directive:
        self._sequence += 1
        if report.rl_step < self.rl_step:
            return Directive(rank.rank, self._sequence, report.rl_step, True, None)
        session = self._session
        order = session.order if session is not None and rank.replica.index in session.replicas else None
        return Directive(rank.rank, self._sequence, report.rl_step, self.rollout_over, order)
