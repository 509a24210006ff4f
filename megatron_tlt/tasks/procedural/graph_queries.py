"""Questions about small graphs, answered in JSON; witnesses such as paths are checked, not compared.

The solution of ``graph u 4 0-1 1-2|distance 0 2`` has the nodes by distance from 0: ``0``, ``1``, ``2``, and then
``#### 2``.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from megatron_tlt.tasks.procedural.family import Cell, Instance, ProblemFamily, ProceduralParams
from megatron_tlt.tasks.procedural.graph_checks import witness_problem
from megatron_tlt.tasks.procedural.graph_data import PlainGraph
from megatron_tlt.tasks.procedural.graph_form import graph_digest
from megatron_tlt.tasks.procedural.graph_questions import QUESTIONS
from megatron_tlt.tasks.procedural.integers import integer_closeness
from megatron_tlt.tasks.sizes import Sizes


class GraphQueriesParams(ProceduralParams):
    """Axes: the ``queries`` (see ``graph_questions.QUESTIONS``; default all) and whether graphs are ``directed`` and
    ``weighted``.

    A graph has ``nodes`` nodes, ``density`` edges per node (at most all pairs), and weights from 1 to ``max_weight``.
    """

    queries: Annotated[tuple[str, ...], Field(min_length=1)] = tuple(sorted(QUESTIONS))
    directed: Annotated[tuple[bool, ...], Field(min_length=1)] = (False, True)
    weighted: Annotated[tuple[bool, ...], Field(min_length=1)] = (False, True)
    nodes: Sizes = Sizes(min=5, max=10, tail=0.0)
    density: Annotated[float, Field(ge=0.5, le=6.0)] = 1.4
    max_weight: Annotated[int, Field(ge=2, le=99)] = 9

    @field_validator("queries")
    @classmethod
    def _known(cls, queries: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(queries) - QUESTIONS.keys()):
            raise ValueError(f"found {unknown[0]!r}; allowed: {', '.join(sorted(QUESTIONS))}")
        return queries

    @field_validator("nodes")
    @classmethod
    def _several(cls, nodes: Sizes) -> Sizes:
        if nodes.min < 3 or nodes.max > 25:
            raise ValueError(f"found {nodes.min} to {nodes.max} nodes; allowed: 3 to 25")
        return nodes


class GraphQueries(ProblemFamily):
    name = "graph_queries"
    params_type = GraphQueriesParams

    def axes(self, params: GraphQueriesParams) -> list[Cell]:
        self._params = params
        axes = itertools.product(
            sorted(set(params.queries)), sorted(set(params.directed)), sorted(set(params.weighted))
        )
        return [
            {"query": query, "directed": directed, "weighted": weighted}
            for query, directed, weighted in axes
            if directed in QUESTIONS[query].directed and weighted in QUESTIONS[query].weighted
        ]

    def build(self, rng: random.Random, cell: Cell) -> Instance | None:
        graph = self._graph(rng, cell)
        question = QUESTIONS[cell["query"]]
        arguments = rng.sample(range(graph.nodes), question.node_arguments)
        if question.takes_steps:
            arguments.append(rng.randint(1, 3))
        found = question.solve(graph, *arguments)
        if found is None:
            return None
        answer, steps, optimum = found
        nodes, further = arguments[: question.node_arguments], arguments[question.node_arguments :]
        asked = " ".join(map(str, [cell["query"], *arguments]))
        return Instance(
            compact=f"graph {_compact(graph)}|{asked}",
            natural=f"{_natural(graph)} {question.text.format(*arguments)} Answer with JSON: {question.form}.",
            answer=json.dumps(answer, separators=(",", ":")),
            steps=steps,
            canonical=json.dumps([cell["query"], further, _canonical(graph, nodes, numbers=True)]),
            structure=json.dumps([cell["query"], _canonical(graph, nodes, numbers=False)]),
            check={"graph": graph.plain, "query": cell["query"], "arguments": arguments, "optimum": optimum},
        )

    def _graph(self, rng: random.Random, cell: Cell) -> PlainGraph:
        nodes = self._params.nodes.sample(rng)
        pairs = [(u, v) for u in range(nodes) for v in range(nodes) if (u != v if cell["directed"] else u < v)]
        question, first = QUESTIONS[cell["query"]], list[tuple[int, int]]()
        shape = None if question.is_truth and rng.random() < 0.5 else question.shape  # both answers as often
        order = rng.sample(range(nodes), nodes)
        if shape == "acyclic":
            pairs = [(u, v) for u, v in pairs if order[u] < order[v]]
        elif shape == "bipartite":
            cut = rng.randint(1, nodes - 1)
            pairs = [(u, v) for u, v in pairs if (order[u] < cut) != (order[v] < cut)]
        elif shape == "connected":
            joined = [(order[i], order[rng.randrange(i)]) for i in range(1, nodes)]
            first = [(min(edge), max(edge)) for edge in joined]
        wanted = min(len(pairs), max(1, round(self._params.density * nodes)))
        rest = [pair for pair in pairs if pair not in first]
        chosen = sorted([*first, *rng.sample(rest, max(0, wanted - len(first)))])
        weights = [rng.randint(1, self._params.max_weight) if cell["weighted"] else 1 for _ in chosen]
        edges = tuple((u, v, w) for (u, v), w in zip(chosen, weights, strict=True))
        return PlainGraph(nodes, cell["directed"], cell["weighted"], edges)

    @staticmethod
    def closeness(answer: str, check: Mapping[str, Any], given: str) -> float | None:
        wanted = json.loads(answer)
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            return integer_closeness(wanted, given)
        try:
            found = json.loads(given)
        except (ValueError, RecursionError):
            return None
        if isinstance(wanted, bool):
            return float(found is wanted) if isinstance(found, bool) else None
        if not isinstance(found, list):
            return None
        graph = PlainGraph.of(check["graph"])
        return float(witness_problem(graph, check["query"], check["arguments"], check["optimum"], found) is None)


def _compact(graph: PlainGraph) -> str:
    arrow = ">" if graph.directed else "-"
    edges = [f"{u}{arrow}{v}{f':{w}' if graph.weighted else ''}" for u, v, w in graph.edges]
    return " ".join(["d" if graph.directed else "u", str(graph.nodes), *edges])


def _natural(graph: PlainGraph) -> str:
    kind = f"{'A directed' if graph.directed else 'An undirected'} graph"
    edges = json.dumps([list(edge if graph.weighted else edge[:2]) for edge in graph.edges])
    form = "[from, to" if graph.directed else "[node, node"
    return (
        f"{kind} has the nodes 0 to {graph.nodes - 1} and these edges, each as "
        f"{form}{', weight' if graph.weighted else ''}]: {edges}."
    )


def _canonical(graph: PlainGraph, nodes: list[int], *, numbers: bool) -> list[Any]:
    """The same for isomorphic problems about these nodes; without ``numbers`` also for other weights."""
    marks = [",".join(str(i) for i, one in enumerate(nodes) if one == node) for node in range(graph.nodes)]
    form = graph_digest(graph, marks, weights=numbers)
    return [graph.directed, graph.weighted, graph.nodes, len(graph.edges), form]
