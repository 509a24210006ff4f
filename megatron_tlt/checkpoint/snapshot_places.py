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


@dataclass(frozen=True)
class SavedPart:
    """One rank's snapshot on some node.

    Attributes:
        save: what identifies the snapshot of all ranks together that it belongs to; grows from one to the next.
        step: after which it was made.
        slot: its slot's name.
        world: number of ranks that made it.
        rank: the one whose part this is.
    """

    save: str
    step: int
    slot: str
    world: int
    rank: int


@dataclass(frozen=True)
class WholeSnapshot:
    """A snapshot of which every rank's part is on some node; ``present`` has, by node, the ranks whose parts it has."""

    step: int
    slot: str
    world: int
    present: Mapping[int, list[int]]


def newest_whole(found: Mapping[int, Collection[SavedPart]]) -> WholeSnapshot | None:
    """The whole snapshot of the highest step, of several the one made last; None without one.

    Ranks that repeat a step after a restart save it again, maybe with other bits or under another layout. Until all
    nodes have written over the earlier parts, there are parts of both.

    Args:
        found: by node, the parts that are there.
    """
    saves: dict[tuple[int, str, str, int], dict[int, list[int]]] = {}
    for node, parts in found.items():
        for part in parts:
            present = saves.setdefault((part.step, part.save, part.slot, part.world), {each: [] for each in found})
            present[node].append(part.rank)
    for (step, _, slot, world), present in sorted(saves.items(), reverse=True):
        if {one for ranks in present.values() for one in ranks} >= set(range(world)):
            return WholeSnapshot(step, slot, world, present)
    return None


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
