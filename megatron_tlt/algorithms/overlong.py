"""Responses that reach or approach the length limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_tlt.config.algorithm import OverlongConfig
from megatron_tlt.data.rollout_batch import RolloutBatch


def penalized(rewards: Sequence[float], lengths: Sequence[int], limit: int, config: OverlongConfig) -> list[float]:
    """Rewards minus the soft punishment of DAPO (2503.14476, eq. 13) times ``config.penalty``.

    The punishment grows from 0 to 1 over the last ``config.buffer`` part of ``limit`` (tokens).
    """
    buffer = config.buffer * limit
    return [
        reward - config.penalty * min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def without_truncated(batch: RolloutBatch, truncated: Sequence[bool]) -> RolloutBatch:
    """The batch with the tokens of truncated responses left out of the loss; ``truncated`` has all samples."""
    mask_G = torch.cat(
        [
            torch.empty(0, dtype=torch.bool),
            *(torch.full((batch.response_length(i),), not truncated[i]) for i in batch.held),
        ]
    )
    return batch.with_columns(loss_mask_G=mask_G if batch.loss_mask_G is None else mask_G & batch.loss_mask_G)
