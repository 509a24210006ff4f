"""A session's state in the coordinator: its generations and its members' progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_tlt.spot.types import MemberProgress, SessionOrder


class Session:
    """Replicas that train together; ``order`` is sent to their ranks.

    Every call is O(1), amortised over the members' reports, except :meth:`regroup`, which is O(members).

    Args:
        replicas: ranks by replica index.
        leader: a rank of one of them.
        steps_ahead: steps that members may train beyond what all of them have reported.
    """

    def __init__(
        self,
        number: int,
        rl_step: int,
        replicas: Mapping[int, Sequence[int]],
        leader: int,
        steps_ahead: int,
        now: float,
    ) -> None:
        self.number = number
        self.replicas: dict[int, tuple[int, ...]] = {}
        self.started_at = now
        self.deadline = now
        self._ahead = steps_ahead
        self._rl_step = rl_step
        self._steps: dict[int, int] = {}
        self._at_step: Counter[int] = Counter()
        self._unsettled: set[int] = set()
        self._waiting: list[int] = []
        self._freed: list[int] = []
        self.order = SessionOrder(rl_step, number, 0, (), leader, 0, 0, False)
        self.regroup(replicas, leader, at_once=False)

    @property
    def settled(self) -> bool:
        """Whether all members have entered the newest generation, so that it may grow again."""
        return not self._unsettled

    def regroup(self, replicas: Mapping[int, Sequence[int]], leader: int, *, at_once: bool) -> None:
        """Start a new generation over these replicas.

        It starts at the first step that no member was allowed to train yet, so all members change at the same step.
        """
        self.replicas = {index: tuple(replicas[index]) for index in sorted(replicas)}
        members = tuple(rank for ranks in self.replicas.values() for rank in ranks)
        start = self.order.until_step
        self._steps = {rank: self._steps.get(rank, start) for rank in members}
        self._at_step = Counter(self._steps.values())
        self._slowest = min(self._at_step)
        self._unsettled = set(members)
        self.order = SessionOrder(
            self._rl_step, self.number, self.order.generation + 1, members, leader, start, start + self._ahead, at_once
        )

    def advance(self, rank: int, place: MemberProgress) -> bool:
        """Record a member's progress; returns whether the session as a whole advanced."""
        moved = False
        if place.generation == self.order.generation and rank in self._unsettled:
            self._unsettled.remove(rank)
            moved = self.settled
        step, now_at = self._steps[rank], min(place.step, self.order.until_step)
        if now_at <= step:
            return moved
        self._steps[rank] = now_at
        if now_at == self.order.until_step:
            self._waiting.append(rank)
        self._at_step[now_at] += 1
        self._at_step[step] -= 1
        while not self._at_step[self._slowest]:
            del self._at_step[self._slowest]
            self._slowest += 1
            moved = True
        until = self._slowest + self._ahead
        if until > self.order.until_step:
            self.order = replace(self.order, until_step=until)
            self._freed += self._waiting
            self._waiting.clear()
        return moved

    def take_freed(self) -> list[int]:
        """Ranks waiting at ``until_step`` that may continue since it advanced; their reports were answered before."""
        freed, self._freed = self._freed, []
        return freed

    def behind(self) -> set[int]:
        """Indices of the replicas that the others wait for; all of them if that is unknown."""
        ranks = self._unsettled
        if not ranks:
            furthest = max(self._at_step)
            ranks = {rank for rank, step in self._steps.items() if step < furthest}
        late = {index for index, members in self.replicas.items() if not ranks.isdisjoint(members)}
        return late or set(self.replicas)
