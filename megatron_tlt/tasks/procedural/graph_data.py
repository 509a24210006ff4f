"""Small graphs as plain data: edges by number of their nodes, and what the checks of answers need of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class PlainGraph:
    """A simple graph on nodes 0 to ``nodes`` - 1.

    ``edges``: (from, to, weight), from below to in undirected graphs; the weight is 1 in unweighted ones.
    """

    nodes: int
    directed: bool
    weighted: bool
    edges: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> PlainGraph:
        """From :attr:`plain`."""
        edges = tuple((int(u), int(v), int(w)) for u, v, w in plain["edges"])
        return cls(int(plain["nodes"]), bool(plain["directed"]), bool(plain["weighted"]), edges)

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "nodes": self.nodes,
            "directed": self.directed,
            "weighted": self.weighted,
            "edges": [list(edge) for edge in self.edges],
        }

    @cached_property
    def weights(self) -> dict[tuple[int, int], int]:
        """Weight by (from, to), in both directions if undirected."""
        found = {(u, v): w for u, v, w in self.edges}
        return found if self.directed else found | {(v, u): w for u, v, w in self.edges}

    @cached_property
    def successors(self) -> list[list[int]]:
        """Of each node, ascending."""
        found: list[list[int]] = [[] for _ in range(self.nodes)]
        for u, v in sorted(self.weights):
            found[u].append(v)
        return found

    @cached_property
    def networkx(self) -> Any:
        """The same as networkx's graph; nodes and edges ascending."""
        import networkx

        graph = networkx.DiGraph() if self.directed else networkx.Graph()
        graph.add_nodes_from(range(self.nodes))
        graph.add_weighted_edges_from(sorted(self.edges))
        return graph

    def layers(self, start: int) -> list[list[int]]:
        """The nodes by their number of steps from ``start``, ascending within each."""
        seen, layers = {start}, [[start]]
        while layers[-1]:
            following = sorted({v for u in layers[-1] for v in self.successors[u]} - seen)
            seen.update(following)
            layers.append(following)
        return layers[:-1]

    def path_weight(self, path: Sequence[int], *, steps: bool) -> int | None:
        """Sum of weights, or number of ``steps``, along a path without repeated nodes; None if it is not one."""
        pairs = list(pairwise(path))
        if not path or len(set(path)) != len(path) or any(pair not in self.weights for pair in pairs):
            return None
        if any(not 0 <= node < self.nodes for node in path):
            return None
        return len(pairs) if steps else sum(self.weights[pair] for pair in pairs)

    def joins_all(self, edges: Iterable[Sequence[int]]) -> bool:
        """Whether edges of this undirected graph connect all of its nodes."""
        near: dict[int, list[int]] = {node: [] for node in range(self.nodes)}
        for u, v in edges:
            near[u].append(v)
            near[v].append(u)
        seen, waiting = {0}, deque([0])
        while waiting:
            for v in near[waiting.popleft()]:
                if v not in seen:
                    seen.add(v)
                    waiting.append(v)
        return len(seen) == self.nodes

    def augmenting_paths(self, source: int, sink: int) -> list[tuple[list[int], int]]:
        """Shortest augmenting paths of a maximum flow with the amount that each adds (Edmonds and Karp, 1972)."""
        left = dict(self.weights)
        found: list[tuple[list[int], int]] = []
        while True:
            parents = {source: source}
            waiting = deque([source])
            while waiting and sink not in parents:
                u = waiting.popleft()
                for v in range(self.nodes):
                    if v not in parents and left.get((u, v), 0) > 0:
                        parents[v] = u
                        waiting.append(v)
            if sink not in parents:
                return found
            path = [sink]
            while path[-1] != source:
                path.append(parents[path[-1]])
            path.reverse()
            pairs = list(pairwise(path))
            amount = min(left[pair] for pair in pairs)
            for u, v in pairs:
                left[u, v] -= amount
                left[v, u] = left.get((v, u), 0) + amount
            found.append((path, amount))
