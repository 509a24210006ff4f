"""Where copies of ranks' snapshots are, and which must move between nodes; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


def buddies(nodes: Sequence[int]) -> list[int]:
    """For each rank the one on another node that keeps a second copy of its snapshots; itself on a single node.

    The rank with the same position on the next node; where that node has fewer ranks, they are taken in turn.

    Args:
        nodes: the node of each rank.
    """
    names = sorted(set(nodes))
    of = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in names}
    found = []
    for rank, node in enumerate(nodes):
        peers = of[names[(names.index(node) + 1) % len(names)]]
        found.append(peers[of[node].index(rank) % len(peers)] if len(names) > 1 else rank)
    return found


@dataclass(frozen=True)
class Copy:
    """The snapshot of rank ``saved``, of an earlier process group, that goes from one node to another."""

    saved: int
    source: int
    target: int


def whole_steps(present: Mapping[int, Mapping[int, Collection[int]]], worlds: Mapping[int, int]) -> set[int]:
    """The steps of which every rank's snapshot is on some node.

    Args:
        present: by node, by step, the ranks whose snapshots are there.
        worlds: by step, the number of ranks that made it.
    """
    steps = set()
    for step, world in worlds.items():
        here = {saved for node in present.values() for saved in node.get(step, ())}
        if here >= set(range(world)):
            steps.add(step)
    return steps


def needed_copies(present: Mapping[int, Collection[int]], needed: Mapping[int, Collection[int]]) -> list[Copy]:
    """What must move so that each node has what it needs, each from the node that sends least so far.

    Args:
        present: by node, the ranks whose snapshots of the step are there; together all of them.
        needed: by node, the ranks whose snapshots it needs.
    """
    sent = dict.fromkeys(present, 0)
    copies = []
    for node in sorted(needed):
        for saved in sorted(set(needed[node]) - set(present.get(node, ()))):
            source = min(
                (other for other in present if saved in present[other]), key=lambda other: (sent[other], other)
            )
            sent[source] += 1
            copies.append(Copy(saved, source, node))
    return copies
