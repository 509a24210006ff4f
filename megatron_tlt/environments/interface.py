"""What an environment is: an object per episode that answers each of the policy's turns."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_tlt.tasks.types import Problem


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn.

    ``text`` is what the policy reads next; None ends the episode. ``reward`` is the whole episode's: a number, a
    mapping or a ``Reward``, as of a verifier's function. Without one, the task's verifier judges the last turn.
    """

    text: str | None
    reward: Any = None


class Environment(Protocol):
    """One episode. Both methods may be coroutine functions; a method ``close`` is called at the end, if there is one.

    A class is constructed as ``cls(**params)`` for each episode, in a worker process. An error ends its episode with
    reward 0.
    """

    def reset(self, problem: Problem, seed: int) -> Awaitable[None] | None:
        """Starts the episode. All randomness must come from ``seed``."""

    def step(self, turn: str) -> Awaitable[Observation] | Observation:
        """Answers the text of a turn, without its end-of-sequence token."""
