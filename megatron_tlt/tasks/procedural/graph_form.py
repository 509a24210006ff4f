"""A digest of a graph that renaming its nodes does not change."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.tasks.procedural.graph_data import PlainGraph
from megatron_tlt.tasks.seeding import stable_int

_ROUNDS = 4


def graph_digest(graph: PlainGraph, marks: Sequence[str], *, weights: bool) -> str:
    """Equal for isomorphic graphs whose nodes have equal marks, and for few others (Weisfeiler and Leman, 1968).

    Each node has a color, at first its mark. A round gives it a new one, of its own and those of its neighbors, edges
    from it and edges to it by themselves. The digest is of the colors of all rounds. It decides which problems are held
    out, so it must not change: networkx has the same hash, with other values in other releases.

    Args:
        graph: its edges' directions count if it is directed.
        marks: of each node.
        weights: whether those of the edges count.
    """
    around: list[list[tuple[str, int, int]]] = [[] for _ in range(graph.nodes)]
    for u, v, weight in graph.edges:
        counted = weight if weights else 0
        around[u].append(("to" if graph.directed else "", counted, v))
        around[v].append(("from" if graph.directed else "", counted, u))
    colors = [stable_int("mark", mark) for mark in marks]
    found = [*sorted(colors)]
    for _ in range(_ROUNDS):
        near = [sorted((way, weight, colors[other]) for way, weight, other in edges) for edges in around]
        colors = [stable_int("node", color, neighbors) for color, neighbors in zip(colors, near, strict=True)]
        found += sorted(colors)
    return f"{stable_int('graph', found):016x}"
