"""Interface of drafters without a model (token drafters)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = Sequence[int] | npt.NDArray[np.int32]


class Proposal(NamedTuple):
    """Draft tokens, the expected number of accepted ones by the drafter's own estimate, and the match they follow."""

    tokens: list[int]
    score: float
    match_length: int


def no_proposal() -> Proposal:
    """The proposal without a match."""
    return Proposal([], 0.0, 0)


class FinishedResponse(NamedTuple):
    """A response of a rollout on any engine: its problem's key, prompt tokens and response tokens."""

    problem: str
    prompt: TokenIds
    tokens: TokenIds


class TokenDrafter(Protocol):
    """Drafts from token ids alone. Requests of one ``problem`` (samples of one prompt) learn from each other.

    Every draft token occurs in the drafter's input, and a proposal is never longer than requested.
    """

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """Start a request.

        Raises:
            ValueError: the request exists already, or a token is out of range.
        """

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append new tokens of a request; each token is passed once, in order.

        Raises:
            KeyError: the request does not exist.
            ValueError: a token is out of range; nothing is added.
        """

    def propose(self, request_id: str, max_tokens: int, least_probability: float = 0.0) -> Proposal:
        """Return up to ``max_tokens`` draft tokens; none without a match.

        The draft ends before the first token whose joint probability with the tokens before it is below
        ``least_probability``, if the drafter knows probabilities.

        Raises:
            KeyError: the request does not exist.
        """

    def finish(self, request_id: str) -> None:
        """End a request; other requests continue to learn from its response.

        Raises:
            KeyError: the request does not exist.
        """

    def learn(self, problem: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Add a finished response decoded elsewhere, so that other requests of the rollout learn from it.

        Raises:
            ValueError: a token is out of range; nothing is added.
        """

    def begin_step(self) -> None:
        """Start a training step: discard data that is kept for a single step only."""

    def end_rollout(self, responses: Iterable[FinishedResponse]) -> None:
        """End the rollout: later rollouts learn from these responses of all engines.

        All ranks of all engines pass the same responses. A response that this drafter decoded itself is stored only
        once. Responses that it decoded since the last call and that are not in ``responses`` are discarded.
        """

    @property
    def memory_bytes(self) -> int:
        """Memory of the drafter by capacity."""

    def counters(self) -> dict[str, int]:
        """Event counts since construction by name, for example evictions."""
