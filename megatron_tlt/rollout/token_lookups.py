"""Drafters without a model beside an engine's requests: what each has seen of a request, and what it proposes."""

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
    """A running request; ``seen[drafter]`` of its tokens have gone to that token drafter, as of ``problem``."""

    request: Request
    problem: str
    seen: dict[str, int] = field(default_factory=dict)


class TokenLookups:
    """Gives token drafters the tokens of requests, once each and only when they are asked for drafts."""

    def __init__(self, drafters: Mapping[str, TokenDrafter]) -> None:
        """
        Raises:
            ConfigError: a token drafter under a name that is no model-free one.
        """
        if unknown := set(drafters) - set(MODEL_FREE):
            raise ConfigError(f"token drafters {sorted(unknown)}; allowed: {', '.join(MODEL_FREE)}")
        self._drafters = dict(drafters)

    @property
    def names(self) -> tuple[str, ...]:
        """Those there are."""
        return tuple(self._drafters)

    def feed(self, name: str, tracked: TrackedRequest, tokens: np.ndarray[Any, Any]) -> None:
        """Give a drafter what it has not seen of a request's ``tokens`` (length,), prompt included."""
        drafter, request = self._drafters[name], tracked.request
        prompt = len(request.prompt_token_ids)
        if name not in tracked.seen:
            drafter.start(request.request_id, tracked.problem, request.prompt_token_ids)
            tracked.seen[name] = prompt
        if len(tokens) > tracked.seen[name]:
            drafter.extend(request.request_id, tokens[tracked.seen[name] :].tolist())
            tracked.seen[name] = len(tokens)

    def propose(self, name: str, tracked: TrackedRequest, limit: int, least_probability: float) -> list[int]:
        """Up to ``limit`` drafts for a request that the drafter was fed."""
        return self._drafters[name].propose(tracked.request.request_id, limit, least_probability).tokens[:limit]

    def finish(self, tracked: TrackedRequest, response: Sequence[int]) -> None:
        """The request has ended with this response, which all drafters learn, whatever was in force."""
        for name, drafter in self._drafters.items():
            if name in tracked.seen:
                self.feed(name, tracked, np.array((*tracked.request.prompt_token_ids, *response)))
                drafter.finish(tracked.request.request_id)
            elif tracked.request.problem_key:
                drafter.learn(tracked.problem, tracked.request.prompt_token_ids, response)

    def give_up(self, tracked: TrackedRequest) -> None:
        """The request has ended without a response."""
        for name in tracked.seen:
            self._drafters[name].finish(tracked.request.request_id)
