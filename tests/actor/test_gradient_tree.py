"""The sum over logical shards has the same bits for every number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.actor.gradient_tree import PairwiseSum, halving_steps, own_shards
from megatron_tlt.errors import ConfigError

PIECE = 3


def recursive(leaves: torch.Tensor) -> torch.Tensor:
    """The tree by its definition, (V, N) to (N)."""
    return (
        leaves[0] if len(leaves) == 1 else recursive(leaves[: len(leaves) // 2]) + recursive(leaves[len(leaves) // 2 :])
    )


def summed_by(ranks: int, leaves_VN: torch.Tensor) -> torch.Tensor:
    """The sum as so many ranks compute it, without process groups."""
    held = []
    for rank in range(ranks):
        buffer = torch.empty(leaves_VN.shape[1])
        own = own_shards(len(leaves_VN), ranks, rank)
        tree = PairwiseSum([buffer[:2], buffer[2:]], len(own))
        most = 0
        for shard in own:
            buffer.copy_(leaves_VN[shard])
            tree.add()
            most = max(most, tree.pending)
        assert tree.pending == 0 and most <= math.log2(len(own))
        held.append(buffer.view(ranks, -1))
    plans = [list(halving_steps(rank, ranks)) for rank in range(ranks)]
    for level in range(len(plans[0])):
        before = [pieces.clone() for pieces in held]
        for rank, plan in enumerate(plans):
            step = plan[level]
            assert plans[step.partner][level].partner == rank
            assert plans[step.partner][level].sent == step.kept, "what one sends the other adds"
            for piece in step.kept:
                held[rank][piece] += before[step.partner][piece]
    assert all(plan[-1].kept == (rank,) for rank, plan in enumerate(plans) if plan)
    return torch.cat([held[rank][rank] for rank in range(ranks)])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 2**32), st.floats(0.0, 12.0))
def test_every_number_of_ranks_gives_the_bits_of_the_tree(depth: int, seed: int, spread: float) -> None:
    shards = 2**depth
    generator = torch.Generator().manual_seed(seed)
    leaves = torch.randn(shards, shards * PIECE, generator=generator)
    leaves *= torch.exp(spread * torch.randn(leaves.shape, generator=generator))
    expected = recursive(leaves)
    for ranks in (2**level for level in range(depth + 1)):
        assert torch.equal(summed_by(ranks, leaves), expected)


def test_another_order_gives_other_bits() -> None:
    leaves = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(recursive(leaves), leaves.flip(0).cumsum(0)[-1])


def test_a_rank_sends_less_than_the_whole() -> None:
    assert sum(len(step.sent) for step in halving_steps(5, 16)) == 15
    assert list(halving_steps(0, 1)) == []


@pytest.mark.parametrize(("shards", "ranks"), [(6, 2), (8, 3), (2, 4), (0, 1)])
def test_ranks_that_cannot_form_the_tree_are_refused(shards: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"found {shards} with data parallelism {ranks}; allowed: a power of two"):
        own_shards(shards, ranks, 0)


def test_ranks_have_consecutive_shards() -> None:
    assert [list(own_shards(8, 4, rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
