"""Which of several replicas of the weights differ from the others, by their checksums; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OddReplica:
    """A rank whose weights differ, or may differ, from those of its replicas.

    Attributes:
        tensors: indices of the tensors in question, ascending.
        proven: whether, for each of these tensors, more than half of the replicas agree on another checksum. Otherwise
            no majority tells which replica is wrong, and all of them are named.
    """

    rank: int
    tensors: tuple[int, ...]
    proven: bool


def odd_replicas(checksums: Mapping[int, Sequence[Sequence[int]]]) -> list[OddReplica]:
    """The ranks of one replica group that differ, ascending; empty if all are equal.

    Args:
        checksums: by rank, one checksum (any number of integers) for each tensor, in the same order on all ranks.

    Raises:
        ValueError: ranks have different numbers of tensors, so that they are no replicas.
    """
    if len({len(sums) for sums in checksums.values()}) > 1:
        counts = ", ".join(f"rank {rank}: {len(sums)}" for rank, sums in checksums.items())
        raise ValueError(f"replicas must have the same tensors, found {counts}")
    odd: dict[int, list[int]] = {}
    undecided: set[int] = set()
    ranks = list(checksums)
    for index, column in enumerate(zip(*checksums.values(), strict=True)):
        sums = [tuple(checksum) for checksum in column]
        most_frequent, votes = Counter(sums).most_common(1)[0]
        has_majority = 2 * votes > len(ranks)
        for rank, found in zip(ranks, sums, strict=True):
            if has_majority and found == most_frequent:
                continue
            odd.setdefault(rank, []).append(index)
            if not has_majority:
                undecided.add(rank)
    return [OddReplica(rank, tuple(odd[rank]), rank not in undecided) for rank in sorted(odd)]
