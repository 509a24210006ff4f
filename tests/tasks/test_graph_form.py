"""Forms of graph problems: the same whatever the nodes' names, and the same in every release."""

from __future__ import annotations

import itertools
import json
import random

import networkx
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.tasks.procedural import FAMILIES
from megatron_tlt.tasks.procedural.graph_data import PlainGraph
from megatron_tlt.tasks.procedural.graph_form import graph_digest
from megatron_tlt.tasks.procedural.graph_queries import GraphQueriesParams, _canonical
from megatron_tlt.tasks.sizes import Sizes

FORMS = ["25946788e0b37ad3", "01e8340d92877a9d", "2102675df28af8b4", "06ffc65c82a03491"]
"""Of one graph: undirected and directed, without and with weights."""


def test_forms_of_graphs_are_those_of_earlier_releases() -> None:
    """Another digest would move problems between the splits, so a policy would be tested on what it was trained on."""
    edges = ((0, 1, 2), (1, 2, 1), (0, 3, 5))
    found = [
        graph_digest(PlainGraph(4, directed, True, edges), ["0", "", "1", ""], weights=weights)
        for directed in (False, True)
        for weights in (False, True)
    ]
    assert found == FORMS


@given(st.randoms(use_true_random=False), st.booleans())
def test_graphs_of_one_form_are_those_of_networkx(draw: random.Random, weights: bool) -> None:
    def graph() -> PlainGraph:
        pairs = draw.sample([(u, v) for u in range(4) for v in range(u)], draw.randint(2, 4))
        return PlainGraph(4, False, True, tuple((v, u, draw.randint(1, 2)) for u, v in pairs))

    one, other = graph(), graph()
    same = networkx.is_isomorphic(
        one.networkx, other.networkx, edge_match=(lambda a, b: a["weight"] == b["weight"]) if weights else None
    )
    digests = [graph_digest(each, [""] * 4, weights=weights) for each in (one, other)]
    assert (digests[0] == digests[1]) == same, "trees and graphs of four nodes are told apart"


def test_a_number_of_steps_is_no_node() -> None:
    """The same question about a renamed graph is the same problem, whatever the names."""
    axes = {"queries": ("within",), "directed": (False,), "weighted": (False,)}
    params = GraphQueriesParams.model_validate({**axes, "nodes": Sizes(min=4, max=4), "density": 0.75})
    family = FAMILIES["graph_queries"](params)
    forms: dict[str, set[str]] = {}
    for key in range(600):
        drawn = family.draw(key)
        check = drawn.metadata["check"]
        graph, (node, steps) = PlainGraph.of(check["graph"]).networkx, check["arguments"]
        ways = sorted(
            json.dumps([steps, sorted(sorted((names[u], names[v])) for u, v in graph.edges)])
            for names in itertools.permutations(range(4))
            if names[node] == 0
        )
        forms.setdefault(ways[0], set()).add(drawn.metadata["canonical"])
    assert len(forms) > 10 and all(len(each) == 1 for each in forms.values())
    assert len(set.union(*forms.values())) == len(forms)


@given(st.randoms(use_true_random=False))
def test_renamed_nodes_make_the_same_problem(draw: random.Random) -> None:
    nodes = draw.randint(3, 8)
    pairs = [(u, v) for u in range(nodes) for v in range(nodes) if u != v]
    edges = tuple((u, v, draw.randint(1, 3)) for u, v in draw.sample(pairs, draw.randint(1, len(pairs))))
    names = draw.sample(range(nodes), nodes)
    renamed = tuple(sorted((names[u], names[v], w) for u, v, w in edges))
    first, second = PlainGraph(nodes, True, True, edges), PlainGraph(nodes, True, True, renamed)
    assert _canonical(first, [0, 1], numbers=True) == _canonical(second, [names[0], names[1]], numbers=True)
