"""A rank's side of the coordination, without socket, thread or clock: what it reports, and what it is to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from megatron_tlt.spot.types import NO_RL_STEP, Advice, Directive, MemberProgress, Report, SessionOrder


class Follower:
    """Keeps what a rank reports, and the newest directive that it has heard.

    Times are seconds of any clock that only grows. ``first_sequence`` must be above whatever this rank used before.
    """

    def __init__(self, rank: int, silent_after_s: float, now: float, first_sequence: int = 0) -> None:
        self.rank = rank
        self.rl_step = NO_RL_STEP
        self.counts: Counter[str] = Counter()
        """Directives passed over, by reason."""
        self._silent_after_s = silent_after_s
        self._news_at = now
        self._sequence = first_sequence
        self._heard = -1
        self._order: SessionOrder | None = None
        self._over = NO_RL_STEP
        self._released = False
        self._available = False
        self._left_early = False
        """It left unbidden, and the coordinator is not known to have noticed."""
        self._entries = 0
        self._version = 0
        self._place: MemberProgress | None = None
        self._entered = (0, 0)

    # What the rank tells

    def rollout_started(self, rl_step: int) -> None:
        """Its share of ``rl_step``'s rollout begins; whatever it was told before no longer counts.

        Raises:
            ValueError: an RL step that is not after the one before.
            RuntimeError: it is still inside a session.
        """
        if rl_step <= self.rl_step:
            raise ValueError(f"rl_step is {rl_step}; allowed: above {self.rl_step}, the one before")
        if self.inside:
            raise RuntimeError(f"rank {self.rank} is still inside a session; leave() it before the next rollout")
        self.rl_step = rl_step
        self._released = self._available = self._left_early = False
        self._order = None

    def released(self, rl_step: int, num_entries: int, drafter_version: int = 0) -> None:
        """Its share of the rollout is done, and it may train (again).

        Raises:
            ValueError: another RL step than the one whose rollout was started.
        """
        if rl_step != self.rl_step:
            raise ValueError(f"rl_step is {rl_step}; allowed: {self.rl_step}, whose rollout was started")
        self._released = self._available = True
        self._entries, self._version = num_entries, drafter_version

    def withdraw(self) -> None:
        """Something else needs it, or its training failed: no session until :meth:`released` is called again."""
        self._available = False
        self.leave()

    def enter(self, order: SessionOrder, now: float) -> bool:
        """Whether it may build the group of ``order``; False where that is not, or no longer, what is wanted."""
        standing = self._enterable(now)
        if standing is None or standing.name != order.name:
            return False
        self._place = MemberProgress(order.session, order.generation, order.effective_step)
        self._entered = (order.session, order.generation)
        return True

    def at_step_boundary(self, drafter_version: int) -> None:
        """A step of the session is done.

        Raises:
            RuntimeError: it is in no session.
        """
        if self._place is None:
            raise RuntimeError(f"rank {self.rank} is in no session")
        self._place = replace(self._place, step=self._place.step + 1)
        self._version = drafter_version

    def leave(self) -> None:
        """It is out of the session's group; nothing where it was in none.

        Unless the newest order says so, that is to :meth:`withdraw`: whatever drove it out would do so again.
        """
        if self._place is not None and not self._told_to_leave(self._place):
            self._available, self._left_early = False, True
        self._place = None

    def report(self) -> Report:
        """The whole state, under the next sequence number."""
        self._sequence += 1
        return Report(
            self.rank,
            self._sequence,
            self.rl_step,
            self._released,
            self._is_free,
            self._entries,
            self._version,
            self._place,
            self._heard,
        )

    # What the rank is told

    def hear(self, directive: Directive, now: float) -> bool:
        """Take in a directive; whether it changed anything. Old, repeated and misdirected ones are counted only."""
        if directive.rank != self.rank:
            self.counts["misdirected"] += 1
            return False
        if directive.sequence <= self._heard:
            self.counts["replayed"] += 1
            return False
        self._heard, self._news_at = directive.sequence, now
        if directive.rl_step != self.rl_step:
            # written before the coordinator knew that this rank had gone on
            self.counts["of another RL step"] += 1
            return False
        before = self._order, self._over
        self._order = directive.order
        if directive.order is None:
            self._left_early = False
        if directive.rollout_over:
            self._over = directive.rl_step
        return (self._order, self._over) != before

    @property
    def inside(self) -> bool:
        """Whether it is in a session's group."""
        return self._place is not None

    @property
    def place(self) -> MemberProgress | None:
        """Where it trains."""
        return self._place

    @property
    def order(self) -> SessionOrder | None:
        """The session that the coordinator wants it in, as last heard."""
        return self._order

    def rollout_over(self, rl_step: int) -> bool:
        """Whether the coordinator said that ``rl_step``'s rollout is over on all replicas."""
        return rl_step <= self._over

    def silent_for(self, now: float) -> float:
        """Seconds without a word from the coordinator."""
        return now - self._news_at

    def is_silent(self, now: float) -> bool:
        """Whether that is longer than it ever should be."""
        return self.silent_for(now) > self._silent_after_s

    def advice(self, now: float) -> Advice:
        """What to do next; it may be asked at any time, in the middle of a step too."""
        place, order = self._place, self._order
        if place is None:
            return Advice.WAIT if self._enterable(now) is None else Advice.ENTER
        if order is None or self._told_to_leave(place) or self.is_silent(now):
            return Advice.LEAVE
        if order.generation == place.generation and place.step >= order.until_step:
            return Advice.WAIT
        return Advice.TRAIN

    def _told_to_leave(self, place: MemberProgress) -> bool:
        order = self._order
        if order is None or order.session != place.session:
            return True
        return order.generation != place.generation and (order.at_once or place.step >= order.effective_step)

    @property
    def _is_free(self) -> bool:
        return self._available and not self._left_early

    def _enterable(self, now: float) -> SessionOrder | None:
        """The order that stands, unless its generation has been entered already."""
        order = self._order
        if order is None or not self._is_free or self.is_silent(now):
            return None
        return order if (order.session, order.generation) > self._entered else None
