"""Log-probabilities and entropies from logits whose vocabulary is split over tensor-parallel ranks.

The vocabulary is never gathered: the ranks exchange one MAX and two SUM all-reduces of one number per token. Shapes:
N tokens; V is this rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_PADDING = torch.finfo(torch.float32).min / 2
"""Logit of the columns that pad the vocabulary."""


def _all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _scaled(logits_NV: torch.Tensor, temperature: float, vocab_share: int) -> torch.Tensor:
    """Float32 logits divided by the temperature; padding columns, from ``vocab_share`` on, get probability 0."""
    x = logits_NV.float() / temperature
    # finite instead of minus infinity, because the entropy multiplies it by a probability of 0
    x[:, vocab_share:] = _PADDING
    return x


def _sums(
    logits_NV: torch.Tensor, peak_N: torch.Tensor, temperature: float, vocab_share: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's sums of exp(x) and of exp(x) x, with x relative to the peak."""
    # Relative to the peak, because the entropy is a difference of two numbers of this magnitude.
    x = _scaled(logits_NV, temperature, vocab_share) - peak_N[:, None]
    exp = torch.exp(x)
    return exp.sum(-1), (exp * x).sum(-1)


def _slope(
    logits_NV: torch.Tensor,
    log_z_N: torch.Tensor,
    entropy_N: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor],
    temperature: float,
    vocab_share: int,
) -> torch.Tensor:
    """The gradient in x of all columns but the label's, to which the log-probability's own gradient is added."""
    log_p = _scaled(logits_NV, temperature, vocab_share) - log_z_N[:, None]
    # d log p_label / dx = onehot - p;  d H / dx = -p (log p + H)
    return -log_p.exp() * (grads[0][:, None] + grads[1][:, None] * (log_p + entropy_N[:, None]))


def _gradient(
    logits_NV: torch.Tensor,
    log_z_N: torch.Tensor,
    entropy_N: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor],
    temperature: float,
    vocab_share: int,
) -> torch.Tensor:
    """The gradient in the logits, in their dtype, of all columns but the label's."""
    return (_slope(logits_NV, log_z_N, entropy_N, grads, temperature, vocab_share) / temperature).to(logits_NV.dtype)


@cache
def _fused(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function compiled for a GPU: a pass over the logits in place of a dozen. On other devices as it is."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function


class _VocabParallelScores(torch.autograd.Function):
    """Differentiable in the logits; saves the logits and two numbers per token, and recomputes the rest by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        labels_N: torch.Tensor,
        temperature: float,
        chunk: int,
        vocab_start: int,
        vocab_share: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, share = logits_NV.shape
        log_z_N = torch.empty(count, dtype=torch.float32, device=logits_NV.device)
        log_probs_N = torch.empty_like(log_z_N)
        entropy_N = torch.empty_like(log_z_N)
        local_N = labels_N - vocab_start
        inside_N = (local_N >= 0) & (local_N < share)
        local_N = local_N.clamp(0, share - 1)
        sums_of = _fused(_sums, logits_NV.device.type)
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            peak = torch.full_like(log_z_N[rows], _PADDING)
            if vocab_share:
                peak = logits_NV[rows, :vocab_share].max(dim=-1).values.float() / temperature
            _all_reduce(peak, dist.ReduceOp.MAX, group)
            label = logits_NV[rows].gather(-1, local_N[rows, None]).squeeze(-1).float() / temperature - peak
            # outside may be a column of padding, whose logit can be any number
            label = torch.where(inside_N[rows], label, 0.0)
            sums = torch.stack([*sums_of(logits_NV[rows], peak, temperature, vocab_share), label])
            _all_reduce(sums, dist.ReduceOp.SUM, group)
            log_sum = sums[0].log()
            log_z_N[rows] = log_sum + peak
            log_probs_N[rows] = sums[2] - log_sum
            entropy_N[rows] = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits_NV, local_N, inside_N, log_z_N, entropy_N)
        ctx.temperature, ctx.chunk, ctx.vocab_share = temperature, chunk, vocab_share
        return log_probs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_NV, local_N, inside_N, log_z_N, entropy_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        gradient_of = _fused(_gradient, logits_NV.device.type)
        for start in range(0, logits_NV.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits, at = logits_NV[rows], local_N[rows, None]
            saved = log_z_N[rows], entropy_N[rows], (grads[0][rows], grads[1][rows])
            part = gradient_of(logits, *saved, ctx.temperature, ctx.vocab_share)
            label = (_slope(logits.gather(-1, at), *saved, ctx.temperature, 1) + grads[0][rows, None]) / ctx.temperature
            part.scatter_(-1, at, torch.where(inside_N[rows, None], label.to(part.dtype), part.gather(-1, at)))
            grad_NV[rows] = part
        return grad_NV, None, None, None, None, None, None


def vocab_parallel_scores(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 4096,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy at each position, under softmax(logits / temperature).

    Args:
        logits_NV: (N, V) this rank's share of the logits, any float dtype.
        labels_N: (N,) global token ids.
        temperature: as in sampling; above 0.
        chunk_tokens: bounds the extra memory to a few chunk_tokens x V floats.
        vocab_start: the global id of this rank's first column.
        vocab_size: vocabulary size; columns from this global id on are padding and excluded from the softmax. None: no
            padding.
        group: the tensor-parallel group; None if the vocabulary is not split.

    Returns:
        Two (N,) float32 tensors, differentiable in the logits, the same on every rank of ``group``.
    """
    share = logits_NV.shape[1]
    vocab_share = share if vocab_size is None else min(max(vocab_size - vocab_start, 0), share)
    return _VocabParallelScores.apply(logits_NV, labels_N, temperature, chunk_tokens, vocab_start, vocab_share, group)
