"""Who trains the drafter while the longest responses still decode: reports in, directives out.

A pure state machine: no socket, no thread, no clock. A replica whose ranks have all been released is idle; enough idle
ones with enough data form a session; the session ends the moment the last rollout does. There is one session at most,
as there is one drafter. Public code ends it when any worker completes; here only the last one does.
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
    """What a deadline is for; the number that goes with it is in brackets."""

    LOST = 0  # [rank] it has not been heard of
    STUCK = 1  # [session] no step
    STOP = 2  # [sequence of the directive] who has not left since is hanging


@dataclass(slots=True, eq=False)
class _Rank:
    rank: int
    replica: _Replica
    heard_at: float
    sequence: int = -1
    report: Report | None = None
    lost: bool = False
    stop: int | None = None
    """The directive (or the first after it) that told it to leave a session, until it has."""


@dataclass(slots=True, eq=False)
class _Replica:
    index: int
    ranks: list[_Rank] = field(default_factory=list)
    lost: bool = False
    released: bool = False
    idle_since: float | None = None
    """When it became free to train; None where it is not."""
    num_entries: int = 0
    excluded: bool = False
    """From sessions, for the rest of this RL step."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(rank.rank for rank in self.ranks)


class Coordinator:
    """``handle`` each report, ``tick`` when ``next_deadline`` has come; both give the directives to be sent.

    A rank is told whenever what is wanted of it changes, and again in answer to each of its reports: so nothing has to
    be acknowledged, sent again or remembered but the state itself. Reports that are not newer than the newest of their
    rank are passed over. ``now`` is in seconds of any clock that only grows.

    Handling a report costs O(ranks of a replica) and O(log ranks) where it sets a deadline. What concerns all members
    (a new generation, an end) or all ranks (a new RL step, the end of its rollout) costs a directive for each of them;
    a session grows only after all its members have reported, so that is O(1) per report too.

    Args:
        replicas: the ranks of each engine.
        config: without ``min_replicas`` or ``min_entries``, any idle replica starts a session.
        first_sequence: above whatever directives these ranks have heard before.
        steps_ahead: steps that members may train beyond what all have reported; with 2 they need not wait.

    Raises:
        ValueError: no replica, one without ranks, or a rank in two of them.
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
        """What happened so far, by name: sessions, generations, lost replicas, reports passed over and why."""
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
                    raise ValueError(f"rank {number} is there twice; allowed: in one replica, once")
                rank = self._ranks[number] = _Rank(number, replica, now)
                replica.ranks.append(rank)
                self._alarm(now + config.lost_after_s, _Alarm.LOST, number)
        if not replicas:
            raise ValueError("there are no replicas; allowed: 1 and more")

    # Events

    def handle(self, report: Report, now: float) -> list[Directive]:
        """Take in a report. An answer to its sender is always among the directives, unless it was passed over."""
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
        """See to the deadlines that have passed. What has arrived by then is to be handled first."""
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
        """When ``tick`` is next of use."""
        return self._alarms[0][0] if self._alarms else float("inf")

    # What is so

    @property
    def session(self) -> Session | None:
        """The one that is going on."""
        return self._session

    def state_of(self, replica: int) -> ReplicaState:
        """Of the replica with this index."""
        found = self._replicas[replica]
        if found.lost:
            return ReplicaState.LOST
        if self._is_member(found) or any(rank.stop is not None for rank in found.ranks):
            return ReplicaState.TRAINING
        return ReplicaState.IDLE if found.released else ReplicaState.BUSY

    def is_excluded(self, replica: int) -> bool:
        """Whether the replica takes no part in sessions for the rest of this RL step."""
        return self._replicas[replica].excluded

    def _is_member(self, replica: _Replica) -> bool:
        return self._session is not None and replica.index in self._session.replicas

    # Rules

    def _begin_rl_step(self, rl_step: int, now: float) -> None:
        """A rank is in it, so the one before is over for all, whether they were told or not."""
        self._end_session("ended by the next RL step", now)
        self.rl_step, self.rollout_over = rl_step, False
        for replica in self._replicas:
            replica.excluded = False
            self._refresh(replica, now)

    def _follow(self, rank: _Rank, report: Report, now: float) -> None:
        """What a member's report means to the session."""
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
        """End the rollout, or start a session, if it is time."""
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
        """Idle replicas join at a later step, once all members have come as far as the newest generation."""
        session = self._session
        if session is not None and session.settled and self._idle:
            self._regroup([*self._members(session), *self._idle], now, at_once=False)

    def _remove(self, replicas: Iterable[_Replica], now: float) -> None:
        """Members stop; the others go on without them, or not at all."""
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
        """Have replicas leave; ``suspects`` among them are excluded until others are found to be the ones that hang."""
        sequence = self._sequence + 1
        for replica in suspects:
            replica.excluded = True
        for replica in replicas:
            for rank in replica.ranks:
                rank.stop = sequence
            self._refresh(replica, now)
            self._tell(replica)
        # one entry, should several stops precede the same directive
        stopped, suspected = self._stopped.setdefault(sequence, ([], []))
        stopped += replicas
        suspected += suspects
        self._alarm(now + self.config.preempt_timeout_s, _Alarm.STOP, sequence)

    def _elect(self, replicas: Iterable[_Replica]) -> int:
        """The rank whose drafter the others take over: the newest, then of the longest in service, then the lowest."""

        def order(replica: _Replica) -> tuple[int, float, int]:
            report = replica.ranks[0].report
            assert report is not None and replica.idle_since is not None
            return -report.drafter_version, replica.idle_since, replica.index

        return min(replicas, key=order).ranks[0].rank

    # Deadlines

    def _check_heartbeat(self, rank: _Rank, now: float) -> list[_Replica]:
        """The rank's replica if it is lost with it."""
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
        """Who was told to leave and has not, hangs; then whoever was only suspected, and has left, does not."""
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

    # Book-keeping

    def _members(self, session: Session) -> list[_Replica]:
        return [self._replicas[index] for index in session.replicas]

    def _refresh(self, replica: _Replica, now: float) -> None:
        """Bring what follows from a replica's reports, and the totals over all replicas, up to date."""
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
        """What is now wanted of the ranks that are to be told; those never heard of ask first."""
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
