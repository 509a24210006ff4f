"""Whether a path, a set, an order or another witness answers a question about a graph: checked, not compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

from megatron_tlt.tasks.procedural.graph_data import PlainGraph

Check = Callable[[PlainGraph, Sequence[int], int, list[Any]], str | None]


def witness_problem(
    graph: PlainGraph, query: str, arguments: Sequence[int], optimum: int, given: list[Any]
) -> str | None:
    """Why ``given`` does not answer the query; None if it does.

    Args:
        graph: that was asked about.
        query: a name in ``graph_questions.QUESTIONS`` whose answer is a list.
        arguments: of the query.
        optimum: size, number of steps or weight of the best witnesses; 0 where all are equally good.
        given: of JSON types.
    """
    check, of_edges = _CHECKS[query]
    if of_edges:
        if not all(isinstance(edge, list) and len(edge) == 2 and all(map(_is_int, edge)) for edge in given):
            return "not a list of pairs of nodes"
    elif not all(map(_is_int, given)):
        return "not a list of whole numbers"
    return check(graph, arguments, optimum, given)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _neighbors(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[int]) -> str | None:
    return None if sorted(given) == graph.successors[arguments[0]] else "not the nodes to which edges lead"


def _path(steps: bool) -> Check:
    def check(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[int]) -> str | None:
        if [given[0], given[-1]] != list(arguments) if given else True:
            return "it does not begin and end as asked"
        weight = graph.path_weight(given, steps=steps)
        if weight is None:
            return "not a path of the graph"
        return None if weight == optimum else f"its length is {weight}, and {optimum} is possible"

    return check


def _order(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[int]) -> str | None:
    if sorted(given) != list(range(graph.nodes)):
        return "not every node once"
    place = {node: i for i, node in enumerate(given)}
    return None if all(place[u] < place[v] for u, v, _ in graph.edges) else "an edge leads backwards"


def _cycle(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[int]) -> str | None:
    if len(given) < (2 if graph.directed else 3) or len(set(given)) != len(given):
        return "too short, or a node twice"
    closed = all(pair in graph.weights for pair in pairwise([*given, given[0]]))
    return None if closed else "two of its nodes are not joined"


def _set_of(joined: bool) -> Check:
    def check(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[int]) -> str | None:
        if len(set(given)) != len(given) or not all(0 <= node < graph.nodes for node in given):
            return "a node twice, or one that does not exist"
        if any((pair in graph.weights) is not joined for pair in combinations(given, 2)):
            return f"two of them are {'not ' if joined else ''}joined"
        return None if len(given) == optimum else f"{len(given)} nodes, and {optimum} are possible"

    return check


def _matching(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[list[int]]) -> str | None:
    ends = [node for edge in given for node in edge]
    if len(set(ends)) != len(ends) or any(tuple(edge) not in graph.weights for edge in given):
        return "two edges share a node, or one does not exist"
    return None if len(given) == optimum else f"{len(given)} edges, and {optimum} are possible"


def _tree(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[list[int]]) -> str | None:
    if any((edge[0], edge[1]) not in graph.weights for edge in given) or len(given) != graph.nodes - 1:
        return "not a spanning tree's edges"
    if not graph.joins_all(given):
        return "they do not join all nodes"
    weight = sum(graph.weights[edge[0], edge[1]] for edge in given)
    return None if weight == optimum else f"its weight is {weight}, and {optimum} is possible"


def _coloring(graph: PlainGraph, arguments: Sequence[int], optimum: int, given: list[int]) -> str | None:
    if len(given) != graph.nodes or set(given) - {0, 1}:
        return "not a 0 or 1 for each node"
    return None if all(given[u] != given[v] for u, v, _ in graph.edges) else "an edge joins equal colors"


#: Query -> its check, and whether the witness is a list of edges.
_CHECKS: dict[str, tuple[Check, bool]] = {
    "clique": (_set_of(joined=True), False),
    "cycle": (_cycle, False),
    "independent_set": (_set_of(joined=False), False),
    "lightest_path": (_path(steps=False), False),
    "matching": (_matching, True),
    "neighbors": (_neighbors, False),
    "shortest_path": (_path(steps=True), False),
    "spanning_tree": (_tree, True),
    "topological_order": (_order, False),
    "two_coloring": (_coloring, False),
}
