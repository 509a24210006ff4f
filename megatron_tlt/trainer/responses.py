"""Responses of a rollout: what every rank knows of each, and the batch of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import DraftStats, Response
from megatron_tlt.trainer.carried import Versions, whole_versions


@dataclass(frozen=True)
class ScoredResponse:
    """The data of a response that every rank holds: its problem and sample index, draft counts and reward.

    Its tokens are in the :class:`RolloutBatch`, at its index among all responses. ``prompt_length`` and ``length`` are
    numbers of tokens of the prompt and of the response.
    """

    problem: int
    sample: int
    prompt_length: int
    length: int
    finish_reason: str
    draft: DraftStats
    reward: Reward
    turns: int = 1
    said: int | None = None
    """Tokens of the response that the policy said; None: all, as no task has an environment."""
    versions: Versions = ()
    """Runs of its first tokens that earlier policies sampled."""

    def of_problem(self, problem: int) -> ScoredResponse:
        """The same response as one to problem number ``problem``."""
        return replace(self, problem=problem)

    @staticmethod
    def of(problem: int, sample: int, response: Response, reward: Reward) -> ScoredResponse:
        """From a response and its reward; the tokens are left out."""
        lengths = len(response.prompt_token_ids), len(response.token_ids)
        scored = ScoredResponse(problem, sample, *lengths, response.finish_reason, response.draft, reward)
        said = sum(response.loss_mask) if response.loss_mask else None
        return replace(scored, turns=response.turns, said=said, versions=response.versions)

    @property
    def continued(self) -> int:
        """Tokens that were sampled in earlier steps."""
        return sum(count for _, count in self.versions)


def check_responses(responses: Iterable[Response]) -> None:
    """Checks the responses that an engine returned.

    Raises:
        RunError: a response is empty, or does not have one log-prob per token.
    """
    for one in responses:
        if not len(one.token_ids) == len(one.log_probs) > 0:
            raise RunError(
                f"response {one.request_id}: the rollout engine returned {len(one.token_ids)} tokens with "
                f"{len(one.log_probs)} log-probs; allowed: one log-prob per token, at least one token"
            )


def batch_of_responses(
    scored: Sequence[ScoredResponse],
    own: Mapping[tuple[int, int], Response],
    version: int,
    *,
    masked: bool,
    versioned: bool,
) -> RolloutBatch:
    """The batch of all responses, with the tokens of this rank's ``own`` responses (keyed by problem and sample).

    ``masked``: some may have tokens of an environment. ``versioned``: some may have tokens of earlier policies.
    """
    held = [(i, own[s.problem, s.sample]) for i, s in enumerate(scored) if (s.problem, s.sample) in own]
    parts = [np.asarray(ids, np.int32) for _, r in held for ids in (r.prompt_token_ids, r.token_ids)]
    log_probs = [np.asarray(r.log_probs, np.float32) for _, r in held]
    runs = [run for _, r in held for run in whole_versions(r, version)] if versioned else []
    masks = [np.asarray(r.loss_mask, bool) if r.loss_mask else np.ones(len(r.token_ids), bool) for _, r in held]
    return RolloutBatch(
        prompt_lengths_N=torch.tensor([s.prompt_length for s in scored], dtype=torch.int64),
        lengths_N=torch.tensor([s.prompt_length + s.length for s in scored], dtype=torch.int64),
        rewards_N=torch.tensor([s.reward.value for s in scored], dtype=torch.float64),
        advantages_N=torch.zeros(len(scored), dtype=torch.float64),
        versions_N=torch.full((len(scored),), version, dtype=torch.int64),
        held=tuple(i for i, _ in held),
        tokens_S=torch.from_numpy(np.concatenate([np.empty(0, np.int32), *parts])),
        rollout_log_probs_G=torch.from_numpy(np.concatenate([np.empty(0, np.float32), *log_probs])),
        loss_mask_G=torch.from_numpy(np.concatenate([np.empty(0, bool), *masks])) if masked else None,
        versions_G=torch.tensor([v for v, count in runs for _ in range(count)], dtype=torch.int32)
        if versioned
        else None,
    )
