"""What a policy says of responses: put together sample by sample, and on every stage of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.device import current_device

ScoredTokens = tuple[Sequence[int], torch.Tensor, torch.Tensor]
"""Samples of a micro-batch; log-probs and entropies of their response tokens, (G) each."""


class PolicyScores(NamedTuple):
    """Log-probs and entropies of the H samples that this data-parallel rank computed, on the host.

    Args:
        samples: ascending.
        log_probs_G: of their response tokens, one sample's behind another's, float32.
        entropy_sums_H: the sum of the entropies (nats) at a response's tokens, float64.
    """

    samples: tuple[int, ...]
    log_probs_G: torch.Tensor
    entropy_sums_H: torch.Tensor


def put_together(batch: RolloutBatch, samples: Iterable[int], collected: Iterable[ScoredTokens]) -> PolicyScores:
    """The scores of ``samples`` from what the last stage ``collected``; all ranks of a pipeline call it together."""
    order = tuple(sorted(samples))
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for indices, log_probs_G, entropies_G in collected:
        lengths = [batch.response_length(i) for i in indices]
        rows |= zip(indices, zip(log_probs_G.split(lengths), entropies_G.split(lengths), strict=True), strict=True)
    log_probs_G = torch.zeros(sum(batch.response_length(i) for i in order))
    sums_H = torch.zeros(len(order), dtype=torch.float64)
    if rows:
        torch.cat([rows[i][0] for i in order], out=log_probs_G)
        sums_H = torch.stack([rows[i][1].double().sum() for i in order])
    return PolicyScores(order, _from_last_stage(log_probs_G), _from_last_stage(sums_H))


def _from_last_stage(values: torch.Tensor) -> torch.Tensor:
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return values
    values = values.to(current_device().torch_device)
    source, group = (
        parallel_state.get_pipeline_model_parallel_last_rank(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    dist.broadcast(values, source, group=group)
    return values.cpu()


def of_all_samples(values_HK: torch.Tensor, samples: Sequence[int], count: int) -> torch.Tensor:
    """A row of numbers for each of ``count`` samples, (N, K) float64, the same bits on every rank.

    Args:
        values_HK: this data-parallel rank's rows, K of them per sample.
        samples: whose they are; each sample of the batch is one data-parallel rank's.
        count: N.
    """
    rows_NK = torch.zeros(count, values_HK.shape[1], dtype=torch.float64)
    rows_NK[list(samples)] = values_HK.double()
    rows_NK = rows_NK.to(current_device().torch_device)
    dist.all_reduce(rows_NK, group=parallel_state.get_data_parallel_group())  # every row but one is zeros
    return rows_NK.cpu()
