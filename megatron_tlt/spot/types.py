"""What ranks report to the coordinator, and what it wants of them: plain data, each message the whole state.

As every message says everything, a lost one is mended by the next, and of several only the newest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NO_RL_STEP = -1
"""The RL step of a rank whose first rollout has not begun."""


class ReplicaState(Enum):
    """A replica is one engine: all of its tensor-parallel ranks."""

    BUSY = "busy"
    """A rank of it has not finished its share of this RL step's rollout."""
    IDLE = "idle"
    """All of its ranks are released, and none trains."""
    TRAINING = "training"
    """In the session, or told to leave one and not known to have left."""
    LOST = "lost"
    """A rank of it has not been heard of for too long."""


class Advice(Enum):
    """What a released rank does next; see :meth:`megatron_tlt.spot.client.CoordinatorClient.poll`."""

    WAIT = "wait"
    """Nothing, until there is news."""
    ENTER = "enter"
    """There is an order to enter."""
    TRAIN = "train"
    """The next step of the session that it is in."""
    LEAVE = "leave"
    """Out of the session's group, at once: a step in flight is abandoned."""


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """Train with these ranks: what a process group over them, and nobody else, is made of.

    ``members`` are global ranks in the order of their ranks in the group; ``leader`` is the one whose drafter all
    others take over when the generation begins. Steps are numbered through all generations of a session: this one's
    are ``effective_step`` up to, not including, ``until_step``, which moves on as members report. Nobody trains beyond
    it, so a further generation that begins there is missed by none. Members of the generation before train up to
    ``effective_step`` and change over then, or, with ``at_once``, without delay (numbers in between are left out).
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
    """Where a rank trains: session, generation, and its next step."""

    session: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that a rank has to say.

    ``sequence`` grows with every report of this rank. ``released``: its share of ``rl_step``'s rollout is done.
    ``available``: nothing else needs it. ``num_entries`` is how many responses its buffer holds, ``drafter_version``
    its drafter's number of optimizer steps. ``place`` is None outside a session's group. ``heard`` is the sequence of
    the newest directive that it goes by.
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
    """All that the coordinator wants of ``rank``, which is in ``rl_step``.

    ``order`` None means: no session; leave the one that you are in. ``sequence`` grows with every directive.
    """

    rank: int
    sequence: int
    rl_step: int
    rollout_over: bool
    order: SessionOrder | None
