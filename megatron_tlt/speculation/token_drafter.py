"""Drafters without a model: what the engine's side needs of any of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = Sequence[int] | npt.NDArray[np.int32]


class Proposal(NamedTuple):
    """Draft tokens, how many of them to expect accepted by the drafter's own estimate, and the match they follow."""

    tokens: list[int]
    score: float
    match_length: int


def no_proposal() -> Proposal:
    """Where nothing matches."""
    return Proposal([], 0.0, 0)


class FinishedResponse(NamedTuple):
    """A response of a rollout, by whichever engine: its problem's key, prompt tokens and response tokens."""

    problem: str
    prompt: TokenIds
    tokens: TokenIds


class TokenDrafter(Protocol):
    """Proposes from token ids alone. Requests of one ``problem`` (samples of one prompt) learn from each other.

    A token is never anything but one of those that it was given, and a proposal never longer than asked for.
    """

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """A request begins to decode.

        Raises:
            ValueError: there is such a request already, or a token is out of range.
        """

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """The request has gained tokens; all that it has ever gained are given once, in order.

        Raises:
            KeyError: there is no such request.
            ValueError: a token is out of range; nothing is added.
        """

    def propose(self, request_id: str, max_tokens: int, least_probability: float = 0.0) -> Proposal:
        """Up to ``max_tokens`` tokens that may follow; none where nothing matches.

        It ends before a token that it gives, with those before, a probability below ``least_probability``, if it knows
        probabilities.

        Raises:
            KeyError: there is no such request.
        """

    def finish(self, request_id: str) -> None:
        """The request decodes no more; others go on learning from its response.

        Raises:
            KeyError: there is no such request.
        """

    def learn(self, problem: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Adds a finished response that was not decoded here, so that other requests of the rollout learn from it.

        Raises:
            ValueError: a token is out of range; nothing is added.
        """

    def begin_step(self) -> None:
        """Starts a training step: forgets what is kept for a single step only."""

    def end_rollout(self, responses: Iterable[FinishedResponse]) -> None:
        """Ends the rollout: later rollouts learn from these responses of all engines.

        All ranks of all engines pass the same responses. A response that this drafter decoded itself is stored only
        once. Responses that it decoded since the last call and that are not among these are forgotten.
        """

    @property
    def memory_bytes(self) -> int:
        """All that it holds, capacity and not use."""

    def counters(self) -> dict[str, int]:
        """What has happened since the beginning, by name: evictions above all."""
