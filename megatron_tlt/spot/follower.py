"""A rank's state machine in the coordination, without sockets, threads or clocks: its reports and its advice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from megatron_tlt.spot.types import NO_RL_STEP, Advice, Directive, MemberProgress, Report, SessionOrder


class Follower:
    """Holds the state that a rank reports, and the newest directive that it received.

    Times are seconds of any monotonic clock. ``first_sequence`` must be above all numbers that this rank used before.
    """

    def __init__(self, rank: int, silent_after_s: float, now: float, first_sequence: int = 0) -> None:
        self.rank = rank
        self.rl_step = NO_RL_STEP
        self.counts: Counter[str] = Counter()
        """Ignored directives, by reason."""
        self._silent_after_s = silent_after_s
        self._news_at = now
        self._sequence = first_sequence
        self._heard = -1
        self._order: SessionOrder | None = None
        self._over = NO_RL_STEP
        self._released = False
        self._available = False
        self._left_early = False
        """Whether it left without an order and the coordinator may not know yet."""
        self._entries = 0
        self._version = 0
        self._place: MemberProgress | None = None
        self._entered = (0, 0)

    # Reports of the rank

    def rollout_started(self, rl_step: int) -> None:
        """Report that this rank's share of ``rl_step``'s rollout starts; earlier orders become invalid.

        Raises:
            ValueError: ``rl_step`` is not greater than the previous one.
            RuntimeError: the rank is still in a session.
        """
        if rl_step <= self.rl_step:
            raise ValueError(f"rl_step is {rl_step}; allowed: above {self.rl_step}, the one before")
        if self.inside:
            raise RuntimeError(f"rank {self.rank} is still inside a session; leave() it before the next rollout")
        self.rl_step = rl_step
        self._released = self._available = self._left_early = False
        self._order = None

    def released(self, rl_step: int, num_entries: int, drafter_version: int = 0) -> None:
        """Report that this rank finished its share of the rollout, and may train (again).

        Raises:
            ValueError: ``rl_step`` is not that of the started rollout.
        """
        if rl_step != self.rl_step:
            raise ValueError(f"rl_step is {rl_step}; allowed: {self.rl_step}, whose rollout was started")
        self._released = self._available = True
        self._entries, self._version = num_entries, drafter_version

    def withdraw(self) -> None:
        """Report that this rank cannot train; it enters no session until :meth:`released` is called again."""
        self._available = False
        self.leave()

    def enter(self, order: SessionOrder, now: float) -> bool:
        """Enter ``order`` if it is still valid; returns whether the rank may build the session's group."""
        standing = self._enterable(now)
        if standing is None or standing.name != order.name:
            return False
        self._place = MemberProgress(order.session, order.generation, order.effective_step)
        self._entered = (order.session, order.generation)
        return True

    def at_step_boundary(self, drafter_version: int) -> None:
        """Report that a step of the session is done.

        Raises:
            RuntimeError: the rank is in no session.
        """
        if self._place is None:
            raise RuntimeError(f"rank {self.rank} is in no session")
        self._place = replace(self._place, step=self._place.step + 1)
        self._version = drafter_version

    def leave(self) -> None:
        """Report that this rank left the session's group; does nothing outside a session.

        Without an order to leave this is a :meth:`withdraw`, since the cause would probably recur.
        """
        if self._place is not None and not self._told_to_leave(self._place):
            self._available, self._left_early = False, True
        self._place = None

    def report(self) -> Report:
        """The full state, under the next sequence number."""
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

    # Orders to the rank

    def hear(self, directive: Directive, now: float) -> bool:
        """Process a directive; returns whether it changed anything. Old and misdirected ones are only counted."""
        if directive.rank != self.rank:
            self.counts["misdirected"] += 1
            return False
        if directive.sequence <= self._heard:
            self.counts["replayed"] += 1
            return False
        self._heard, self._news_at = directive.sequence, now
        if directive.rl_step != self.rl_step:
            # sent before the coordinator knew that this rank had started the next RL step
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
        """Whether the rank is in a session's group."""
        return self._place is not None

    @property
    def place(self) -> MemberProgress | None:
        """The rank's position in its session."""
        return self._place

    @property
    def order(self) -> SessionOrder | None:
        """The session that the coordinator wants this rank in, according to the newest directive."""
        return self._order

    def rollout_over(self, rl_step: int) -> bool:
        """Whether the coordinator reported that ``rl_step``'s rollout is over on all replicas."""
        return rl_step <= self._over

    def silent_for(self, now: float) -> float:
        """Seconds since the last message from the coordinator."""
        return now - self._news_at

    def is_silent(self, now: float) -> bool:
        """Whether the coordinator has been silent for longer than the limit."""
        return self.silent_for(now) > self._silent_after_s

    def advice(self, now: float) -> Advice:
        """What to do next; may be called at any time, also during a step."""
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
        """The current order, unless its generation was already entered."""
        order = self._order
        if order is None or not self._is_free or self.is_silent(now):
            return None
        return order if (order.session, order.generation) > self._entered else None
