"""What can be asked about a graph: its words, when it has an answer, the answer by networkx, and the steps to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_tlt.tasks.procedural.graph_data import PlainGraph

Solved = tuple[Any, list[str], int]
"""The answer, of JSON types; the lines of its worked solution; the length or weight that a witness must have (0)."""

Shape = Literal["acyclic", "bipartite", "connected"]

_NODES = "a list of nodes"
_EDGES = "a list of edges, each as a list of two nodes"
_NUMBER = "a whole number"
_TRUTH = "true or false"
_UNDIRECTED, _DIRECTED, _EITHER = (False,), (True,), (False, True)
_UNWEIGHTED, _WEIGHTED = (False,), (True,)


@dataclass(frozen=True)
class Question:
    """A question about graphs of some kinds.

    Attributes:
        text: in English; ``{0}``, ``{1}`` are its arguments.
        form: of the answer, in English.
        solve: from the graph and the arguments; None if it has no answer there.
        node_arguments: how many different nodes it is about.
        takes_steps: whether a number of steps follows them.
        directed: kinds of graphs that it is asked about.
        weighted: the same.
        shape: what its graphs are made to be, as random ones rarely are; half of them, if the answer is true or false.
    """

    text: str
    form: str
    solve: Callable[..., Solved | None]
    node_arguments: int = 0
    takes_steps: bool = False
    directed: tuple[bool, ...] = _EITHER
    weighted: tuple[bool, ...] = _UNWEIGHTED
    shape: Shape | None = None

    @property
    def is_truth(self) -> bool:
        """Whether the answer is true or false."""
        return self.form == _TRUTH


def _nx() -> Any:
    import networkx

    return networkx


def _line(nodes: Iterable[int]) -> str:
    return " ".join(map(str, nodes))


def _edge_lines(edges: Iterable[Sequence[int]]) -> list[str]:
    return ["-".join(map(str, edge)) for edge in edges]


def _layers(graph: PlainGraph, start: int) -> list[str]:
    return [_line(layer) for layer in graph.layers(start)]


def _neighbors(graph: PlainGraph, node: int) -> Solved | None:
    found = graph.successors[node]
    return (found, [], 0) if found else None


def _degree(graph: PlainGraph, node: int) -> Solved:
    return len(graph.successors[node]), [_line(graph.successors[node])], 0


def _in_degree(graph: PlainGraph, node: int) -> Solved:
    found = [u for u, v, _ in graph.edges if v == node]
    return len(found), [_line(found)], 0


def _reachable(graph: PlainGraph, start: int, end: int) -> Solved:
    return bool(_nx().has_path(graph.networkx, start, end)), _layers(graph, start), 0


def _distance(graph: PlainGraph, start: int, end: int) -> Solved | None:
    if not _nx().has_path(graph.networkx, start, end):
        return None
    return int(_nx().shortest_path_length(graph.networkx, start, end)), _layers(graph, start), 0


def _shortest_path(graph: PlainGraph, start: int, end: int) -> Solved | None:
    if not _nx().has_path(graph.networkx, start, end):
        return None
    path = _nx().shortest_path(graph.networkx, start, end)
    return path, _layers(graph, start), len(path) - 1


def _within(graph: PlainGraph, start: int, steps: int) -> Solved:
    found = _nx().single_source_shortest_path_length(graph.networkx, start, cutoff=steps)
    return len(found), _layers(graph, start)[: steps + 1], 0


def _components(graph: PlainGraph) -> Solved:
    parts = sorted(sorted(part) for part in _nx().connected_components(graph.networkx))
    return len(parts), list(map(_line, parts)), 0


def _strong_components(graph: PlainGraph) -> Solved:
    parts = sorted(sorted(part) for part in _nx().strongly_connected_components(graph.networkx))
    return len(parts), list(map(_line, parts)), 0


def _triangles(graph: PlainGraph) -> Solved:
    near = [set(nodes) for nodes in graph.successors]
    found = [(u, v, w) for u, v, _ in graph.edges for w in sorted(near[u] & near[v]) if w > v]
    assert len(found) == sum(_nx().triangles(graph.networkx).values()) // 3
    return len(found), list(map(_line, found)), 0


def _bipartite(graph: PlainGraph) -> Solved:
    parts = sorted(min(part) for part in _nx().connected_components(graph.networkx))
    return bool(_nx().is_bipartite(graph.networkx)), [line for first in parts for line in _layers(graph, first)], 0


def _two_coloring(graph: PlainGraph) -> Solved | None:
    if not _nx().is_bipartite(graph.networkx):
        return None
    parts = sorted(min(part) for part in _nx().connected_components(graph.networkx))
    colors = {node: number % 2 for first in parts for number, layer in enumerate(graph.layers(first)) for node in layer}
    lines = [line for first in parts for line in _layers(graph, first)]
    return [colors[node] for node in range(graph.nodes)], lines, 0


def _acyclic(graph: PlainGraph) -> Solved:
    order = _removed_in_order(graph)
    return bool(_nx().is_directed_acyclic_graph(graph.networkx)), [_line(order)] if order else [], 0


def _topological_order(graph: PlainGraph) -> Solved | None:
    order = _removed_in_order(graph)
    return (order, [], 0) if len(order) == graph.nodes else None


def _removed_in_order(graph: PlainGraph) -> list[int]:
    """Nodes in the order in which the least without predecessors is removed, while there is one (Kahn, 1962)."""
    incoming = [sum(1 for _, v, _ in graph.edges if v == node) for node in range(graph.nodes)]
    order: list[int] = []
    while ready := [node for node in range(graph.nodes) if incoming[node] == 0 and node not in order]:
        order.append(ready[0])
        for node in graph.successors[ready[0]]:
            incoming[node] -= 1
    return order


def _cycle(graph: PlainGraph) -> Solved | None:
    try:
        found = [int(edge[0]) for edge in _nx().find_cycle(graph.networkx)]
    except _nx().NetworkXNoCycle:
        return None
    return found, [], 0


def _bridges(graph: PlainGraph) -> Solved:
    found = sorted(tuple(sorted(edge)) for edge in _nx().bridges(graph.networkx))
    return len(found), _edge_lines(found), 0


def _cut_nodes(graph: PlainGraph) -> Solved:
    found = sorted(_nx().articulation_points(graph.networkx))
    return len(found), [_line(found)] if found else [], 0


def _diameter(graph: PlainGraph) -> Solved | None:
    if not _nx().is_connected(graph.networkx):
        return None
    eccentricity = _nx().eccentricity(graph.networkx)
    return max(eccentricity.values()), [_line(eccentricity[node] for node in range(graph.nodes))], 0


def _clique(graph: PlainGraph) -> Solved:
    best = min(_nx().find_cliques(graph.networkx), key=lambda nodes: (-len(nodes), sorted(nodes)))
    return sorted(best), [], len(best)


def _independent_set(graph: PlainGraph) -> Solved:
    best = min(_nx().find_cliques(_nx().complement(graph.networkx)), key=lambda nodes: (-len(nodes), sorted(nodes)))
    return sorted(best), [], len(best)


def _matching(graph: PlainGraph) -> Solved:
    found = sorted(sorted(edge) for edge in _nx().max_weight_matching(graph.networkx, maxcardinality=True, weight=None))
    return found, [], len(found)


def _settled(graph: PlainGraph, start: int) -> list[str]:
    """Nodes with their distance, in the order in which they are settled (Dijkstra, 1959)."""
    found = _nx().single_source_dijkstra_path_length(graph.networkx, start)
    return [" ".join(f"{node}:{length}" for node, length in found.items())]


def _lightest_distance(graph: PlainGraph, start: int, end: int) -> Solved | None:
    if not _nx().has_path(graph.networkx, start, end):
        return None
    return int(_nx().dijkstra_path_length(graph.networkx, start, end)), _settled(graph, start), 0


def _lightest_path(graph: PlainGraph, start: int, end: int) -> Solved | None:
    if not _nx().has_path(graph.networkx, start, end):
        return None
    length, path = _nx().single_source_dijkstra(graph.networkx, start, end)
    return path, _settled(graph, start), int(length)


def _tree(graph: PlainGraph) -> tuple[list[list[int]], int] | None:
    if not _nx().is_connected(graph.networkx):
        return None
    edges = list(_nx().minimum_spanning_edges(graph.networkx, algorithm="kruskal"))
    return [[u, v] for u, v, _ in edges], sum(data["weight"] for _, _, data in edges)


def _tree_weight(graph: PlainGraph) -> Solved | None:
    found = _tree(graph)
    return None if found is None else (found[1], _weighted_lines(graph, found[0]), 0)


def _spanning_tree(graph: PlainGraph) -> Solved | None:
    found = _tree(graph)
    return None if found is None else (found[0], _weighted_lines(graph, found[0]), found[1])


def _weighted_lines(graph: PlainGraph, edges: Iterable[Sequence[int]]) -> list[str]:
    return [f"{u}-{v}:{graph.weights[u, v]}" for u, v in edges]


def _max_flow(graph: PlainGraph, source: int, sink: int) -> Solved | None:
    value = int(_nx().maximum_flow_value(graph.networkx, source, sink, capacity="weight"))
    if value == 0:
        return None
    return value, [f"{'>'.join(map(str, path))}:{amount}" for path, amount in graph.augmenting_paths(source, sink)], 0


#: Name of a query -> question.
QUESTIONS: dict[str, Question] = {
    "acyclic": Question("Is there no directed cycle?", _TRUTH, _acyclic, directed=_DIRECTED, shape="acyclic"),
    "bipartite": Question(
        "Can its nodes be split in two sets so that every edge joins both?",
        _TRUTH,
        _bipartite,
        directed=_UNDIRECTED,
        shape="bipartite",
    ),
    "bridges": Question(
        "How many edges, each removed alone, increase the number of connected components?",
        _NUMBER,
        _bridges,
        directed=_UNDIRECTED,
    ),
    "clique": Question(
        "Name a largest set of nodes that are all joined to each other.", _NODES, _clique, directed=_UNDIRECTED
    ),
    "components": Question("How many connected components are there?", _NUMBER, _components, directed=_UNDIRECTED),
    "cut_nodes": Question(
        "How many nodes, each removed alone with its edges, increase the number of connected components?",
        _NUMBER,
        _cut_nodes,
        directed=_UNDIRECTED,
    ),
    "cycle": Question(
        "Name the nodes of a cycle in order, without repeating the first one.", _NODES, _cycle, directed=_EITHER
    ),
    "degree": Question("How many edges does node {0} have?", _NUMBER, _degree, 1, directed=_UNDIRECTED),
    "diameter": Question(
        "What is the largest number of edges on a shortest path between two nodes?",
        _NUMBER,
        _diameter,
        directed=_UNDIRECTED,
        shape="connected",
    ),
    "distance": Question("How many edges has a shortest path from {0} to {1}?", _NUMBER, _distance, 2),
    "in_degree": Question("How many edges lead to node {0}?", _NUMBER, _in_degree, 1, directed=_DIRECTED),
    "independent_set": Question(
        "Name a largest set of nodes of which no two are joined.", _NODES, _independent_set, directed=_UNDIRECTED
    ),
    "lightest_distance": Question(
        "What is the least weight of a path from {0} to {1}?",
        _NUMBER,
        _lightest_distance,
        2,
        weighted=_WEIGHTED,
    ),
    "lightest_path": Question(
        "Name the nodes of a path from {0} to {1} with the least sum of weights, both included.",
        _NODES,
        _lightest_path,
        2,
        weighted=_WEIGHTED,
    ),
    "matching": Question(
        "Name as many edges as possible of which no two share a node.", _EDGES, _matching, directed=_UNDIRECTED
    ),
    "max_flow": Question(
        "The weights are capacities. What is the largest flow from {0} to {1}?",
        _NUMBER,
        _max_flow,
        2,
        directed=_DIRECTED,
        weighted=_WEIGHTED,
    ),
    "neighbors": Question("Name all nodes to which an edge leads from node {0}.", _NODES, _neighbors, 1),
    "out_degree": Question("How many edges leave node {0}?", _NUMBER, _degree, 1, directed=_DIRECTED),
    "reachable": Question("Is there a path from {0} to {1}?", _TRUTH, _reachable, 2),
    "shortest_path": Question(
        "Name the nodes of a path from {0} to {1} with the fewest edges, both included.", _NODES, _shortest_path, 2
    ),
    "spanning_tree": Question(
        "Name the edges of a spanning tree with the least sum of weights.",
        _EDGES,
        _spanning_tree,
        directed=_UNDIRECTED,
        weighted=_WEIGHTED,
        shape="connected",
    ),
    "strong_components": Question(
        "How many strongly connected components are there?", _NUMBER, _strong_components, directed=_DIRECTED
    ),
    "topological_order": Question(
        "Name all nodes in an order in which every edge leads to a later node.",
        _NODES,
        _topological_order,
        directed=_DIRECTED,
        shape="acyclic",
    ),
    "tree_weight": Question(
        "What is the least sum of weights of a spanning tree?",
        _NUMBER,
        _tree_weight,
        directed=_UNDIRECTED,
        weighted=_WEIGHTED,
        shape="connected",
    ),
    "triangles": Question(
        "How many sets of three nodes are there of which any two are joined?", _NUMBER, _triangles, directed=_UNDIRECTED
    ),
    "two_coloring": Question(
        "Give each node the color 0 or 1 so that the ends of every edge differ: the colors of nodes 0, 1, 2 and so on.",
        "a list of 0 and 1",
        _two_coloring,
        directed=_UNDIRECTED,
        shape="bipartite",
    ),
    "within": Question(
        "How many nodes, with {0} itself, can be reached from {0} over at most {1} edges?",
        _NUMBER,
        _within,
        1,
        takes_steps=True,
    ),
}
