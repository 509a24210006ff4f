"""Feeds the tokens of an engine's requests to its token drafters, and collects their drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.types import Request
from megatron_tlt.speculation.strategy import MODEL_FREE
from megatron_tlt.speculation.token_drafter import TokenDrafter


@dataclass
class TrackedRequest:
    """A running request; ``seen[drafter]`` of its tokens were fed to that token drafter, under ``problem``."""

    request: Request
    problem: str
    seen: dict[str, int] = field(default_factory=dict)


KnownTokens = np.ndarray[Any, Any] | Sequence[int]
"""A request's tokens so far, prompt included."""


@dataclass
class DraftingRow:
    """A request's row in the batch after a step, its tokens so far, and how many draft tokens it may get."""

    index: int
    internal_id: str
    num_tokens: int
    limit: int


class TokenLookups:
    """Feeds token drafters each token of a request once, and only when drafts are requested."""

    def __init__(self, drafters: Mapping[str, TokenDrafter]) -> None:
        """
        Raises:
            ConfigError: a token drafter has the name of no token drafter kind.
        """
        if unknown := set(drafters) - set(MODEL_FREE):
            raise ConfigError(f"token drafters {sorted(unknown)}; allowed: {', '.join(MODEL_FREE)}")
        self._drafters = dict(drafters)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the token drafters."""
        return tuple(self._drafters)

    def feed(self, name: str, tracked: TrackedRequest, tokens: KnownTokens) -> None:
        """Feed a drafter the part of a request's ``tokens`` (length,), prompt included, that it has not seen."""
        drafter, request = self._drafters[name], tracked.request
        prompt = len(request.prompt_token_ids)
        if name not in tracked.seen:
            drafter.start(request.request_id, tracked.problem, request.prompt_token_ids)
            tracked.seen[name] = prompt
        if len(tokens) > tracked.seen[name]:
            new = tokens[tracked.seen[name] :]
            drafter.extend(request.request_id, new.tolist() if isinstance(new, np.ndarray) else new)
            tracked.seen[name] = len(tokens)

    def propose(self, name: str, tracked: TrackedRequest, limit: int, least_probability: float) -> list[int]:
        """Up to ``limit`` draft tokens for a request that was fed to the drafter."""
        return self._drafters[name].propose(tracked.request.request_id, limit, least_probability).tokens[:limit]

    def finish(self, tracked: TrackedRequest, response: Sequence[int]) -> None:
        """End a request with its response, which all drafters learn, whatever strategy was active."""
        for name, drafter in self._drafters.items():
            if name in tracked.seen:
                self.feed(name, tracked, (*tracked.request.prompt_token_ids, *response))
                drafter.finish(tracked.request.request_id)
            elif tracked.request.problem_key:
                drafter.learn(tracked.problem, tracked.request.prompt_token_ids, response)

    def give_up(self, tracked: TrackedRequest) -> None:
        """End a request without a response."""
        for name in tracked.seen:
            self._drafters[name].finish(tracked.request.request_id)
