"""A policy's scores of responses, assembled by sample and broadcast to every pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_tlt.actor.batches import MicroBatch
from megatron_tlt.actor.context import gather_context
from megatron_tlt.actor.log_probs import vocab_parallel_scores
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.device import current_device

ScoredTokens = tuple[Sequence[int], torch.Tensor, torch.Tensor]
"""Samples of a micro-batch; log-probs and entropies of their response tokens, (G) each."""


class PolicyScores(NamedTuple):
    """Log-probs and entropies of the H samples that this data-parallel rank computed, on the host.

    Args:
        samples: indices, ascending.
        log_probs_G: of the response tokens, concatenated over samples, float32.
        entropy_sums_H: sum of the entropies (nats) over a response's tokens in the loss mask, float64.
    """

    samples: tuple[int, ...]
    log_probs_G: torch.Tensor
    entropy_sums_H: torch.Tensor


def on_this_context_rank(batch: MicroBatch) -> MicroBatch:
    """The part of a micro-batch that this context-parallel rank processes."""
    return batch.on_context_rank(
        parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    )


def logit_scores(
    logits_RTV: torch.Tensor, batch: MicroBatch, temperature: float, *, vocab_size: int, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a micro-batch, (B, W) each, from this rank's share of its logits."""
    share = logits_RTV.shape[-1]
    rank = parallel_state.get_tensor_model_parallel_rank()
    labels = on_this_context_rank(batch).labels_RT
    log_probs, entropy = vocab_parallel_scores(
        logits_RTV.reshape(-1, share),
        labels.reshape(-1),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        vocab_start=rank * share,
        vocab_size=vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    group = parallel_state.get_context_parallel_group()
    whole = [gather_context(v.view_as(labels), batch.cu_seqlens, group) for v in (log_probs, entropy)]
    return batch.by_sample(whole[0]), batch.by_sample(whole[1])


def assemble_scores(batch: RolloutBatch, samples: Iterable[int], collected: Iterable[ScoredTokens]) -> PolicyScores:
    """The scores of ``samples``, from those that the last stage ``collected``; a collective of a pipeline's ranks."""
    order = tuple(sorted(samples))
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for indices, log_probs_G, entropies_G in collected:
        lengths = [batch.response_length(i) for i in indices]
        rows |= zip(indices, zip(log_probs_G.split(lengths), entropies_G.split(lengths), strict=True), strict=True)
    log_probs_G = torch.zeros(sum(batch.response_length(i) for i in order))
    sums_H = torch.zeros(len(order), dtype=torch.float64)
    if rows:
        torch.cat([rows[i][0] for i in order], out=log_probs_G)
        sums_H = torch.stack([entropy_sum(batch, i, rows[i][1]) for i in order])
    return PolicyScores(order, _from_last_stage(log_probs_G), _from_last_stage(sums_H))


def entropy_sum(batch: RolloutBatch, sample: int, entropies: torch.Tensor) -> torch.Tensor:
    """The sum over a sample's response ``entropies`` (nats) in the loss mask: float64, no dimension."""
    if batch.loss_mask_G is not None:
        entropies = entropies[batch.response("loss_mask_G", sample)]
    return entropies.double().sum()


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
    """Gathers K numbers for each of ``count`` samples, (N, K) float64, bitwise equal on every rank.

    Args:
        values_HK: K numbers for each of this data-parallel rank's samples.
        samples: the indices of these samples; each sample belongs to exactly one data-parallel rank.
        count: N.
    """
    rows_NK = torch.zeros(count, values_HK.shape[1], dtype=torch.float64)
    rows_NK[list(samples)] = values_HK.double()
    rows_NK = rows_NK.to(current_device().torch_device)
    dist.all_reduce(rows_NK, group=parallel_state.get_data_parallel_group())  # only one rank's row is nonzero
    return rows_NK.cpu()
