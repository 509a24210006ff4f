"""One binary tree over logical shards, in which gradients are summed whatever the number of ranks; pure.

With V shards, a power of two, the sum is ((s0 + s1) + (s2 + s3)) + ...: each level adds neighbours. R ranks, a power of
two up to V, hold V/R consecutive shards each, so a rank's part of the tree is a subtree, and the ranks are the leaves
of the rest. Floating-point addition is commutative but not associative: the order within a pair does not matter, so
the sum has the same bits for every R.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.config.strict import forms_tree
from megatron_tlt.errors import ConfigError


def own_shards(shards: int, ranks: int, rank: int) -> range:
    """The logical shards of a data-parallel rank.

    Raises:
        ConfigError: the ranks cannot form the rest of the tree.
    """
    if not forms_tree(shards, ranks):
        raise ConfigError(
            f"elastic.logical_shards: found {shards} with data parallelism {ranks}; allowed: a power of two, at least "
            "the data parallelism, which is a power of two as well"
        )
    each = shards // ranks
    return range(rank * each, (rank + 1) * each)


class PairwiseSum:
    """Sums leaves in the tree's order as they come, like a binary counter.

    Args:
        buffers: where each leaf's values are when it is added, and where the sum is in the end, in place.
        leaves: how many there will be, a power of two. At most log2 of it more sets of buffers exist at a time.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], leaves: int) -> None:
        self._buffers = buffers
        self._leaves, self._added = leaves, 0
        self._pending: list[list[torch.Tensor]] = []
        self._free: list[list[torch.Tensor]] = []

    @property
    def pending(self) -> int:
        """Sums that wait for their neighbour, each of them a set of buffers."""
        return len(self._pending)

    @torch.no_grad()
    def add(self) -> None:
        """Adds the leaf in the buffers; unless it is the last, the next one overwrites them."""
        self._added += 1
        count = self._added
        while not count & 1:
            waiting = self._pending.pop()
            for buffer, left in zip(self._buffers, waiting, strict=True):
                buffer += left
            self._free.append(waiting)
            count >>= 1
        if self._added < self._leaves:
            kept = self._free.pop() if self._free else [torch.empty_like(buffer) for buffer in self._buffers]
            for target, buffer in zip(kept, self._buffers, strict=True):
                target.copy_(buffer)
            self._pending.append(kept)


@dataclass(frozen=True)
class HalvingStep:
    """One exchange with a ``partner``: it gets our values of the pieces ``sent``, and we add its own of ``kept``."""

    partner: int
    sent: tuple[int, ...]
    kept: tuple[int, ...]


def halving_steps(rank: int, ranks: int) -> Iterator[HalvingStep]:
    """How ``ranks`` equal pieces are summed over as many ranks in the tree's order; piece r ends on rank r.

    Recursive halving: the first step is with the neighbour in the tree's lowest level, the next with one of the
    neighbouring pair, and so on. A rank sends half of the pieces first, then a quarter: (R - 1)/R of the values in all.
    """
    pieces = tuple(range(ranks))
    bit = 1
    while bit < ranks:
        kept = tuple(piece for piece in pieces if not (piece ^ rank) & bit)
        yield HalvingStep(rank ^ bit, tuple(piece for piece in pieces if piece not in kept), kept)
        pieces, bit = kept, bit << 1
