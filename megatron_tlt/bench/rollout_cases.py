"""What `tlt bench rollout` decodes: long-tailed requests of fixed lengths, and drafts that are replayed."""

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
    """Rollouts that are timed together, one after another; ``batch`` 0 stands for the whole pool at once."""

    batch: int
    rollouts: tuple[tuple[Request, ...], ...]

    @property
    def name(self) -> str:
        """As in the rows."""
        return f"batch {self.batch}" if self.batch else "whole rollout"


def of_length(request: Request, num_tokens: int) -> Request:
    """The request with a response of exactly that length."""
    sampling = replace(request.sampling, max_tokens=num_tokens, min_tokens=num_tokens)
    return replace(request, sampling=sampling)


@dataclass(frozen=True)
class Epochs:
    """The same problems again and again: other samples each time, whose lengths scatter about the problem's own.

    ``spread`` is the standard deviation of a length's logarithm from one repeat to the next; none exceeds ``longest``.
    """

    spread: float
    longest: int

    def length(self, request: Request, repeat: int) -> int:
        """Tokens of the response in this repeat, the same for every arm."""
        draw = random.Random(f"{request.seed}/{request.request_id}/{repeat}").gauss(0.0, self.spread)
        return min(self.longest, max(1, round(request.sampling.max_tokens * math.exp(draw))))

    def asked(self, requests: Sequence[Request], arm: str, repeat: int) -> list[Request]:
        """The requests of one arm in one repeat.

        Drafters without a model know an arm's own earlier responses to a problem, and nothing that others were
        answered; so does what expects a problem's length.
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
    """Lengths of a Pareto law with that exponent, cut off at ``longest``."""
    draw = random.Random(seed)
    return [min(longest, int(shortest * draw.paretovariate(tail))) for _ in range(count)]


def make_cases(pool: Sequence[Request], batches: Sequence[int], rollouts: int) -> list[RolloutCase]:
    """The whole pool, and for each batch size up to ``rollouts`` disjoint rollouts of so many of its requests.

    Each rollout has the pool's law of lengths: requests in equal steps through it from one of the longest on, so that
    a small one is a rollout's tail, and not a dozen tokens.
    """
    ordered = sorted(pool, key=lambda request: -request.sampling.max_tokens)
    cases = [RolloutCase(0, (tuple(pool),))]
    for batch in batches:
        stride = len(ordered) // batch
        starts = range(min(rollouts, stride))
        cases.append(RolloutCase(batch, tuple(tuple(ordered[start::stride][:batch]) for start in starts)))
    return cases


def make_groups(pool: Sequence[Request], batch: int, group: int, count: int) -> list[list[Request]]:
    """``count`` rollouts of ``batch`` requests over problems of their own, as steps of a run are.

    Each problem has several samples: ``group`` of them in a large batch, fewer in a small one, whose problems would be
    too few to differ in length. Problems are taken in equal steps through the pool, from one of the longest on.

    Raises:
        ConfigError: the pool has too few problems.
    """
    samples = max(1, min(group, batch // 4))
    problems = batch // samples
    stride = len(pool) // problems
    if count > stride:
        raise ConfigError(f"--requests is {len(pool)}; allowed for {count} rollouts of {batch}: {count * problems} on")
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
    """A ``TokenDrafter`` that knows how each request goes on, and errs at one token in so many.

    It stands for a head whose acceptance per position is ``acceptance``: which tokens it gets right depends on request
    and position alone. It costs nothing to run, which a head does not.
    """

    def __init__(self, responses: Mapping[str, Sequence[int]], acceptance: float, vocab_size: int) -> None:
        self._responses = responses
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._lengths: dict[str, int] = {}
        self.memory_bytes = 0

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """As ``TokenDrafter.start``."""
        self._lengths[request_id] = 0

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """As ``TokenDrafter.extend``."""
        self._lengths[request_id] += len(tokens)

    def propose(self, request_id: str, max_tokens: int, least_probability: float = 0.0) -> Proposal:
        """As ``TokenDrafter.propose``."""
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
        """As ``TokenDrafter.finish``."""
        del self._lengths[request_id]

    def learn(self, problem: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Does nothing: this drafter does not learn."""

    def begin_step(self) -> None:
        """Does nothing: this drafter does not learn."""

    def end_rollout(self, responses: Iterable[FinishedResponse]) -> None:
        """Does nothing: this drafter does not learn."""

    def counters(self) -> dict[str, int]:
        """As ``TokenDrafter.counters``."""
        return {}
