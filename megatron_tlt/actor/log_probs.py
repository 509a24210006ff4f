"""Log-probabilities and entropies from logits whose vocabulary is split over tensor-parallel ranks.

The vocabulary is never gathered: the ranks exchange one MAX and two SUM all-reduces of one number per token. Shapes:
N tokens; V is this rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _scaled(logits_NV: torch.Tensor, temperature: float, vocab_share: int) -> torch.Tensor:
    """Float32 logits divided by the temperature; padding columns, from ``vocab_share`` on, get probability 0."""
    x = logits_NV.float() / temperature
    # finite instead of minus infinity, because the entropy multiplies it by a probability of 0
    x[:, vocab_share:] = torch.finfo(x.dtype).min / 2
    return x


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
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            x = _scaled(logits_NV[rows], temperature, vocab_share)
            peak = _all_reduce(x.max(dim=-1).values, dist.ReduceOp.MAX, group)
            # Relative to the peak, because the entropy is a difference of two numbers of this magnitude.
            x = x - peak[:, None]
            exp = torch.exp(x)
            target = x.gather(-1, local_N[rows, None]).squeeze(-1) * inside_N[rows]
            sums = torch.stack([exp.sum(-1), (exp * x).sum(-1), target])
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
        grad_log_probs_N, grad_entropy_N = grads
        logits_NV, local_N, inside_N, log_z_N, entropy_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for start in range(0, logits_NV.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_p = _scaled(logits_NV[rows], ctx.temperature, ctx.vocab_share) - log_z_N[rows, None]
            p = log_p.exp()
            # d log p_label / dx = onehot - p;  d H / dx = -p (log p + H)
            grad = -p * (grad_log_probs_N[rows, None] + grad_entropy_N[rows, None] * (log_p + entropy_N[rows, None]))
            grad.scatter_add_(-1, local_N[rows, None], (grad_log_probs_N[rows] * inside_N[rows])[:, None])
            grad_NV[rows] = (grad / ctx.temperature).to(grad_NV.dtype)
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
