"""Data types of a rollout's requests and responses; independent of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_tlt.rewards.types import Reward

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling parameters; names and meanings are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` -1 or 0 and ``top_p`` 1.0 disable the filter. ``stop`` strings need the model
    folder's tokenizer. They and ``stop_token_ids`` take effect after ``min_tokens`` tokens.
    ``logprobs`` is how many of the most likely tokens are reported at each position besides the sampled one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int = 0


@dataclass(frozen=True)
class Request:
    """A request for one response, sampled with ``seed``.

    All responses to a problem share its ``problem_key`` in every step, so that drafters learn across them. A seed then
    gives the same response only after the same other responses; without a key it always gives the same response.
    ``sample`` numbers the responses to a problem within a rollout, from 0. The last ``begun`` tokens of the prompt are
    the beginning of a response that an earlier rollout left.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSpec
    seed: int
    problem_key: str = ""
    sample: int = 0
    begun: int = 0


@dataclass(frozen=True)
class DraftStats:
    """Speculation counts of one request, or summed over many.

    ``accepted_per_position[i]`` counts drafts whose (i+1)-th token was accepted. ``num_steps`` counts engine steps that
    produced tokens for the request, with or without drafts; ``num_tokens / num_steps`` is the acceptance length.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per decode step, the bonus token included (1.0: no gain)."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0

    def __add__(self, other: DraftStats) -> DraftStats:
        width = max(len(self.accepted_per_position), len(other.accepted_per_position))

        def padded(row: tuple[int, ...]) -> tuple[int, ...]:
            return row + (0,) * (width - len(row))

        return DraftStats(
            self.num_steps + other.num_steps,
            self.num_tokens + other.num_tokens,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(
                a + b
                for a, b in zip(padded(self.accepted_per_position), padded(other.accepted_per_position), strict=True)
            ),
        )


@dataclass(frozen=True)
class Response:
    """A finished response. Engines return tokens as ``array("i")`` and log-probs as ``array("f")``, 4 bytes each.

    ``log_probs[t]`` is the log-probability of ``token_ids[t]`` under the distribution it was sampled from: temperature,
    top-p and top-k applied (vLLM's ``processed_logprobs``).
    ``finish_reason`` is "stop", "length" or "abort". ``finished_at`` is in seconds since the start of the rollout.
    In a response of several ``turns``, ``loss_mask[t]`` is False for tokens of the environment, whose ``log_probs`` are
    0; an empty mask is True for all. ``reward`` is the environment's, in a replay.
    ``routes`` are the experts of all tokens but the last, prompt included, if they are recorded: uint8, as
    ``data.routes`` encodes them.
    ``top_log_probs[t]`` holds (token, log-probability) of the most likely tokens, in descending order, if requested.
    ``versions`` are runs (policy version, number of tokens) of the first tokens, where earlier policies sampled them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    finished_at: float
    draft: DraftStats = field(default_factory=DraftStats)
    loss_mask: Sequence[bool] = ()
    turns: int = 1
    reward: Reward | None = None
    routes: torch.Tensor | None = None
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ShardSlice:
    """Position of a rank's shard in the full tensor: rows ``start .. start + length`` of dimension ``dim``."""

    dim: int
    start: int
    length: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """The matching view of the full tensor."""
        return full.narrow(self.dim, self.start, self.length)
