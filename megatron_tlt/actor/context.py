"""Context parallelism: which positions of a row a rank holds, and values of all positions put together again.

A sequence is cut into 2 C parts for C ranks; rank r holds parts r and 2 C - 1 - r, so that causal attention costs
every rank the same (as in Megatron-LM). Rows here are micro-batches of R rows and T tokens, T/C of them on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist


def context_positions(cu_seqlens: Sequence[int], rank: int, size: int) -> list[int]:
    """The positions of a row that ``rank`` of ``size`` holds, in the order it holds them.

    ``cu_seqlens`` are the ends of the row's sequences, from 0. Raises ValueError for a sequence whose length is no
    multiple of twice ``size``.
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
    """All ranks' values, side by side; what a rank's loss says about other ranks' values is theirs to say."""

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
    """This rank's values, (R, T/C), and the other ranks', as (R, T) in the order of the row; the same on every rank.

    Differentiable for a loss that every rank of ``group`` computes alike: a rank's gradient is that of its own values,
    and a sum over the ranks' parameter gradients is the whole.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return values_RT
    order = torch.tensor([p for rank in range(size) for p in context_positions(cu_seqlens, rank, size)])
    gathered_RT = _Gather.apply(values_RT, group).transpose(0, 1).flatten(1)
    return gathered_RT[:, order.argsort().to(values_RT.device)]
