"""Rules that must hold in every simulated history of the coordinator, checked against the simulated world."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.follower import Follower
from megatron_tlt.spot.session import Session
from megatron_tlt.spot.types import NO_RL_STEP, Directive, MemberProgress, ReplicaState, SessionOrder

GRACE_S = 1.0
"""Simulated seconds, on a good network, within which an idle replica joins the session and a session progresses."""
LONGEST_TRIP_S = 3.5


@dataclass
class History:
    """Results of one history: ``violations`` are sentences, empty if all rules hold."""

    seed: int
    violations: list[str] = field(default_factory=list)
    reports: int = 0
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class SimulatedRank:
    """One rank's true state."""

    number: int
    replica: int
    follower: Follower
    entries: int
    busy: bool = True
    free_since: float | None = None
    """Time of its release, while nothing else needs it."""
    done: bool = False
    """Finished with this RL step, waiting for the others in the next collective."""
    dead: bool = False
    hangs_until: float = 0.0
    cut_off_until: float = 0.0
    computes: MemberProgress | None = None
    left: MemberProgress | None = None
    """Its place when it last left a group."""
    version: int = 0
    newest: Directive | None = None
    """The newest directive that reached it."""
    entered: set[str] = field(default_factory=set)


class Rules:
    """Receives every event, and records broken rules in the history."""

    def __init__(
        self, history: History, coordinator: Coordinator, ranks: list[SimulatedRank], replicas: int, *, good: bool
    ) -> None:
        self._history = history
        self._coordinator = coordinator
        self._config = coordinator.config
        self._ranks = ranks
        self._replicas = range(replicas)
        self._good = good
        self.now = 0.0
        self._over = NO_RL_STEP
        self._session = 0
        self._members: frozenset[int] = frozenset()
        self._progress_at = 0.0
        self._trained_under: dict[tuple[int, int], int] = {}

    def violated(self, what: str) -> None:
        self._history.violations.append(f"seed {self._history.seed}, {self.now:.3f} s: {what}")

    # What ranks do

    def heard(self, rank: SimulatedRank, directive: Directive) -> None:
        """A directive reached a rank."""
        if rank.newest is None or directive.sequence > rank.newest.sequence:
            rank.newest = directive
        told = rank.follower.rollout_over(rank.follower.rl_step)
        if told and rank.follower.rl_step > self._over:
            self.violated(f"rank {rank.number} treats rollout {rank.follower.rl_step} as over, but it is not")

    def entered(self, rank: SimulatedRank, order: SessionOrder) -> None:
        """A rank entered the group of an order."""
        wanted = rank.newest.order if rank.newest is not None else None
        if rank.busy or order.rl_step != rank.follower.rl_step or rank.number not in order.members:
            self.violated(f"rank {rank.number} entered {order.name} though it is not to train in it")
        if wanted is None or wanted.name != order.name:
            self.violated(f"rank {rank.number} entered {order.name}, which is not its newest order")
        if order.name in rank.entered:
            self.violated(f"rank {rank.number} entered {order.name} twice")
        rank.entered.add(order.name)
        left = rank.left
        changes = left is not None and (left.session, left.generation + 1) == (order.session, order.generation)
        if left is not None and changes and not order.at_once and left.step != order.effective_step:
            self.violated(f"rank {rank.number} entered {order.name} at step {left.step}, not {order.effective_step}")
        self._progress_at = self.now

    def trained(self, place: MemberProgress) -> None:
        """A group completed a step."""
        if self._trained_under.setdefault((place.session, place.step), place.generation) != place.generation:
            self.violated(f"step {place.step} of session {place.session} was trained under two generations")
        self._progress_at = self.now

    # What the coordinator does

    def decided(self) -> None:
        """The coordinator handled an event."""
        coordinator = self._coordinator
        if coordinator.rollout_over and coordinator.rl_step > self._over:
            self._declared_over()
        # a rank in the next rollout is sufficient proof
        self._over = max(self._over, coordinator.rl_step - (not coordinator.rollout_over))
        session = coordinator.session
        if session is None:
            self._members = frozenset()
            return
        if coordinator.rollout_over or session.order.rl_step != coordinator.rl_step:
            self.violated(f"session {session.number} goes on after the rollout's end")
        if any(coordinator.state_of(index) is ReplicaState.LOST for index in session.replicas):
            self.violated(f"{session.order.name} has a lost replica")
        if session.number != self._session:
            self._session, self._members, self._progress_at = session.number, frozenset(), self.now
            self._began(session)
        members = frozenset(session.order.members)
        if members != self._members:
            self._regrouped(session, members)
        self._members = members

    def _declared_over(self) -> None:
        for rank in self._ranks:
            living = self._coordinator.state_of(rank.replica) is not ReplicaState.LOST
            if living and (rank.busy or rank.follower.rl_step != self._coordinator.rl_step):
                self.violated(f"rollout {self._coordinator.rl_step} was declared over before rank {rank.number} ended")

    def _began(self, session: Session) -> None:
        entries = sum(self._ranks[number].entries for number in session.order.members)
        if len(session.replicas) < self._coordinator.min_replicas or entries < self._coordinator.min_entries:
            self.violated(f"{session.order.name} began with {len(session.replicas)} replicas and {entries} entries")

    def _regrouped(self, session: Session, members: frozenset[int]) -> None:
        order = session.order
        if len(members) != len(order.members) or order.leader not in members:
            self.violated(f"{order.name}: members {order.members}, leader {order.leader}")
        if len(session.replicas) < self._coordinator.min_replicas:
            self.violated(f"{order.name} has {len(session.replicas)} replicas")
        for number in members - self._members:
            rank = self._ranks[number]
            if rank.follower.inside:
                self.violated(f"rank {number} was ordered into {order.name} while inside another group")
            if rank.busy or rank.follower.rl_step != self._coordinator.rl_step:
                self.violated(f"rank {number} was ordered into {order.name} before it was released")
            if self._coordinator.is_excluded(rank.replica):
                self.violated(f"rank {number} was ordered into {order.name} though its replica is excluded")

    # What has to happen in time

    def watch(self) -> None:
        """Periodic: sessions progress or are cut off; on a good network no idle replica is left out."""
        session = self._coordinator.session
        still = self.now - max(self._progress_at, session.started_at) if session is not None else 0.0
        longest = GRACE_S if self._good else self._config.session_timeout_s + LONGEST_TRIP_S
        if session is not None and still > longest:
            self.violated(f"{session.order.name} has stood still for {still:.1f} s")
        if not self._good or self._coordinator.rollout_over:
            return
        idle = [index for index in self._replicas if self._idle(index)]
        ranks = [rank for rank in self._ranks if rank.replica in idle]
        enough = len(idle) >= self._coordinator.min_replicas
        if enough and sum(rank.entries for rank in ranks) >= self._coordinator.min_entries:
            for rank in ranks:
                if rank.number not in self._members:
                    self.violated(f"rank {rank.number} was left out though it has long been idle")

    def _idle(self, replica: int) -> bool:
        ranks = [rank for rank in self._ranks if rank.replica == replica]
        return all(
            rank.free_since is not None and rank.free_since + GRACE_S < self.now and not rank.done for rank in ranks
        )
