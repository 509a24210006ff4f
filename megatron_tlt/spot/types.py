"""Reports of ranks and directives of the coordinator: plain data; each message contains the full state.

A lost message is therefore repaired by the next one, and of several messages only the newest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NO_RL_STEP = -1
"""The RL step of a rank before its first rollout."""


class ReplicaState(Enum):
    """A replica is one engine: all of its tensor-parallel ranks."""

    BUSY = "busy"
    """At least one of its ranks has not finished its share of this RL step's rollout."""
    IDLE = "idle"
    """All of its ranks are released, and none trains."""
    TRAINING = "training"
    """In the session, or ordered to leave one and not known to have left."""
    LOST = "lost"
    """The heartbeat of at least one of its ranks is missing."""


class Advice(Enum):
    """What a released rank does next; see :meth:`megatron_tlt.spot.client.CoordinatorClient.poll`."""

    WAIT = "wait"
    """Wait for orders."""
    ENTER = "enter"
    """Enter the current order."""
    TRAIN = "train"
    """Train the next step of the current session."""
    LEAVE = "leave"
    """Leave the session's group at once; abandon a step in flight."""


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """An order to train in a process group of exactly these ranks.

    ``members`` are global ranks in group order. ``leader`` is the rank whose drafter is broadcast when the generation
    starts. Steps are numbered through all generations of a session: this one's are ``effective_step`` up to, but not
    including, ``until_step``, which advances as members report. No member trains beyond it, so no member misses a
    further generation that starts there. Members of the previous generation train up to ``effective_step`` and then
    change or, with ``at_once``, change immediately (numbers in between are skipped).
    """

    rl_step: int
    session: int
    generation: int
    members: tuple[int, ...]
    leader: int
    effective_step: int
    until_step: int
    at_once: bool

    @property
    def name(self) -> str:
        """Unique in a run: a prefix for the store through which the group is built."""
        return f"spot/{self.rl_step}/{self.session}/{self.generation}"


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """A rank's position: session, generation, and its next step."""

    session: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Report:
    """The full state of a rank.

    ``sequence`` grows with every report of this rank. ``released``: its share of ``rl_step``'s rollout is done.
    ``available``: nothing else needs the rank. ``num_entries`` is the number of buffered responses, ``drafter_version``
    its drafter's number of optimizer steps. ``place`` is None outside a session's group. ``heard`` is the sequence of
    the newest directive that it received.
    """

    rank: int
    sequence: int
    rl_step: int
    released: bool
    available: bool
    num_entries: int
    drafter_version: int
    place: MemberProgress | None
    heard: int


@dataclass(frozen=True, slots=True)
class Directive:
    """The coordinator's order to ``rank``, which is in ``rl_step``.

    ``order`` None means: leave the current session, if any. ``sequence`` grows with every directive.
    """

    rank: int
    sequence: int
    rl_step: int
    rollout_over: bool
    order: SessionOrder | None
