"""Context parallelism: the positions of a row that a rank holds, and gathering of values over all positions.

A sequence is split into 2 C parts for C ranks; rank r holds parts r and 2 C - 1 - r, so that causal attention costs
the same on every rank (as in Megatron-LM). A micro-batch has R rows of T tokens; a rank holds T/C positions of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist


def context_positions(cu_seqlens: Sequence[int], rank: int, size: int) -> list[int]:
    """The positions of a row that ``rank`` of ``size`` holds, in the order it holds them.

    ``cu_seqlens`` are the boundaries of the row's sequences, starting with 0.

    Raises:
        ValueError: the length of a sequence is not a multiple of ``2 * size``.
    """
    positions: list[int] = []
    for start, stop in pairwise(cu_seqlens):
        part, rest = divmod(stop - start, 2 * size)
        if rest:
            raise ValueError(f"a sequence of {stop - start} tokens; allowed: a multiple of {2 * size}")
        for at in (rank, 2 * size - 1 - rank):
            positions.extend(range(start + at * part, start + (at + 1) * part))
    return positions


class _Gather(torch.autograd.Function):
    """All-gathers the ranks' values; the backward pass keeps only the gradient of this rank's own values."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.rank = dist.get_rank(group)
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, values.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0][ctx.rank], None


def gather_context(values_RT: torch.Tensor, cu_seqlens: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers all ranks' values, (R, T/C) each, to (R, T) in the order of the row; the same on every rank.

    Differentiable if every rank of ``group`` computes the same loss: a rank gets the gradient of its own values, and
    the parameter gradients summed over the ranks are the full gradient.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return values_RT
    order = torch.tensor([p for rank in range(size) for p in context_positions(cu_seqlens, rank, size)])
    gathered_RT = _Gather.apply(values_RT, group).transpose(0, 1).flatten(1)
    return gathered_RT[:, order.argsort().to(values_RT.device)]
