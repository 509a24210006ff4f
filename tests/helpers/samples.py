"""Samples in plain Python, and as the batch that a policy takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.actor.scores import PolicyScores
from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RolloutBatch


@dataclass(frozen=True)
class Sample:
    """A prompt with its response; the columns have an entry per response token, or none at all."""

    token_ids: tuple[int, ...]
    prompt_length: int
    advantage: float = 1.0
    old_log_probs: tuple[float, ...] = ()
    reference_log_probs: tuple[float, ...] = ()
    token_weights: tuple[float, ...] = ()


def batch_of(samples: Sequence[Sample]) -> RolloutBatch:
    """All samples, held."""
    columns = {
        name: [value for s in samples for value in getattr(s, name)]
        for name in ("old_log_probs", "reference_log_probs", "token_weights")
    }
    return RolloutBatch.of_sequences(
        [s.token_ids for s in samples],
        [s.prompt_length for s in samples],
        [s.advantage for s in samples],
        **{f"{name}_G": torch.tensor(values) for name, values in columns.items() if values},
    )


def log_probs_of_all(batch: RolloutBatch, scores: PolicyScores) -> list[list[float]]:
    """The log-probs of every sample from those that each rank has of its share; called by all ranks."""
    mine = batch.holding(scores.samples).with_columns(old_log_probs_G=scores.log_probs_G)
    whole = redistribute(mine, range(batch.num_samples))
    return [whole.response("old_log_probs_G", i).tolist() for i in range(batch.num_samples)]
