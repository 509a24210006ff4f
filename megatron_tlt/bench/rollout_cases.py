"""Requests of `tlt bench rollout`: long-tailed with fixed lengths, and replayed drafts."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.types import Request
from megatron_tlt.speculation.token_drafter import FinishedResponse, Proposal, no_proposal


@dataclass(frozen=True)
class RolloutCase:
    """Consecutive rollouts that are timed together; ``batch`` 0 is the whole pool at once."""

    batch: int
    rollouts: tuple[tuple[Request, ...], ...]

    @property
    def name(self) -> str:
        """The name in the rows."""
        return f"batch {self.batch}" if self.batch else "whole rollout"


def of_length(request: Request, num_tokens: int) -> Request:
    """The request with a response of exactly this length."""
    sampling = replace(request.sampling, max_tokens=num_tokens, min_tokens=num_tokens)
    return replace(request, sampling=sampling)


@dataclass(frozen=True)
class Epochs:
    """The same problems in every repeat, with other samples whose lengths vary around the problem's own.

    ``spread`` is the standard deviation of a length's logarithm between repeats; none exceeds ``longest``.
    """

    spread: float
    longest: int

    def length(self, request: Request, repeat: int) -> int:
        """Tokens of the response in this repeat, the same for every arm."""
        draw = random.Random(f"{request.seed}/{request.request_id}/{repeat}").gauss(0.0, self.spread)
        return min(self.longest, max(1, round(request.sampling.max_tokens * math.exp(draw))))

    def asked(self, requests: Sequence[Request], arm: str, repeat: int) -> list[Request]:
        """The requests of one arm in one repeat.

        Drafters without a model, and predictors of lengths, know only the arm's own earlier responses to a problem.
        """
        return [
            replace(
                of_length(request, self.length(request, repeat)),
                seed=_hashed(f"{request.seed}/{repeat}", 7),
                problem_key=f"{arm}/{request.request_id}",
            )
            for request in requests
        ]


def _hashed(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")


def pareto_lengths(count: int, shortest: int, longest: int, tail: float, seed: int) -> list[int]:
    """Lengths of a Pareto distribution with this exponent, truncated at ``longest``."""
    draw = random.Random(seed)
    return [min(longest, int(shortest * draw.paretovariate(tail))) for _ in range(count)]


def make_cases(pool: Sequence[Request], batches: Sequence[int], rollouts: int) -> list[RolloutCase]:
    """The whole pool, and for each batch size up to ``rollouts`` disjoint rollouts of that many requests.

    Each rollout keeps the pool's distribution of lengths: its requests are at equal steps, starting with one of the
    longest, so that a small rollout is a long tail rather than a dozen tokens.
    """
    ordered = sorted(pool, key=lambda request: -request.sampling.max_tokens)
    cases = [RolloutCase(0, (tuple(pool),))]
    for batch in batches:
        stride = len(ordered) // batch
        starts = range(min(rollouts, stride))
        cases.append(RolloutCase(batch, tuple(tuple(ordered[start::stride][:batch]) for start in starts)))
    return cases


def make_groups(pool: Sequence[Request], batch: int, group: int, count: int) -> list[list[Request]]:
    """``count`` rollouts of ``batch`` requests, each with its own problems, like a run's steps.

    Each problem has several samples: ``group`` in a large batch. A small batch has fewer, as otherwise it would have
        too
    few problems with different lengths. Problems are at equal steps through the pool, starting with one of the longest.

    Raises:
        ConfigError: the pool has too few problems.
    """
    samples = max(1, min(group, batch // 4))
    problems = batch // samples
    stride = len(pool) // problems
    if count > stride:
        raise ConfigError(
            f"--requests is {len(pool)}; allowed for {count} rollouts of {batch}: at least {count * problems}"
        )
    ordered = sorted(pool, key=lambda request: -request.sampling.max_tokens)
    return [
        [
            replace(
                request,
                request_id=f"{request.request_id}-{sample}",
                seed=_hashed(f"{request.seed}/{sample}", 7),
                problem_key=request.request_id,
            )
            for request in ordered[start::stride][:problems]
            for sample in range(samples)
        ]
        for start in range(count)
    ]


class ReplayDrafter:
    """A ``TokenDrafter`` that knows how each request continues, with errors at a fixed rate.

    It represents a head whose acceptance per position is ``acceptance``: whether a token is correct depends only on
    request and position. Unlike a head, it costs no time.
    """

    def __init__(self, responses: Mapping[str, Sequence[int]], acceptance: float, vocab_size: int) -> None:
        self._responses = responses
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._lengths: dict[str, int] = {}
        self.memory_bytes = 0

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """See ``TokenDrafter.start``."""
        self._lengths[request_id] = 0

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``TokenDrafter.extend``."""
        self._lengths[request_id] += len(tokens)

    def propose(self, request_id: str, max_tokens: int, least_probability: float = 0.0) -> Proposal:
        """See ``TokenDrafter.propose``."""
        at = self._lengths[request_id]
        known = self._responses[request_id][at : at + max_tokens]
        if not known:
            return no_proposal()
        drafts = [
            token if self._is_right(request_id, at + i) else (token + 1) % self._vocab_size
            for i, token in enumerate(known)
        ]
        return Proposal(drafts, self._acceptance * len(drafts), at)

    def _is_right(self, request_id: str, position: int) -> bool:
        return _hashed(f"{request_id}/{position}", 4) < self._acceptance * 2**32

    def finish(self, request_id: str) -> None:
        """See ``TokenDrafter.finish``."""
        del self._lengths[request_id]

    def learn(self, problem: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Does nothing: this drafter does not learn."""

    def begin_step(self) -> None:
        """Does nothing: this drafter does not learn."""

    def end_rollout(self, responses: Iterable[FinishedResponse]) -> None:
        """Does nothing: this drafter does not learn."""

    def counters(self) -> dict[str, int]:
        """See ``TokenDrafter.counters``."""
        return {}
