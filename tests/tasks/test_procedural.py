"""Procedural families: worked solutions verify, other answers do not, answers equal independent implementations."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards.verifiers import VERIFIERS, verifier_problems
from megatron_tlt.tasks import build_sources
from megatron_tlt.tasks.marker import ANSWER_MARKER, in_format
from megatron_tlt.tasks.procedural import FAMILIES
from megatron_tlt.tasks.procedural.graph_checks import witness_problem
from megatron_tlt.tasks.procedural.graph_data import PlainGraph
from megatron_tlt.tasks.procedural.graph_questions import QUESTIONS
from megatron_tlt.tasks.procedural.integers import integer_closeness
from megatron_tlt.tasks.types import Problem

NAMES = sorted(FAMILIES)
verify = VERIFIERS["procedural"]


def task(name: str, answer_format: str | None = None, **params: Any) -> TaskConfig:
    return TaskConfig.model_validate(
        {"kind": "procedural", "name": name, "params": params, "answer_format": answer_format, "chat": False}
    )


def solved(problem: Problem, answer: str) -> str:
    assert problem.solution is not None
    return problem.solution.rpartition(ANSWER_MARKER)[0] + f"{ANSWER_MARKER} {answer}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_worked_solutions_verify_mutated_ones_fail_and_the_splits_are_disjoint(name: str, count: int) -> None:
    train = build_sources([task(name)], "train", seed=1).problems(0, count)
    held_out = build_sources([task(name)], "held_out", seed=1).problems(0, max(100, count // 10))
    for problem in train:
        assert problem.solution is not None
        verdict = verify(problem, problem.solution)
        assert (verdict.value, verdict.correct, verdict.extracted) == (1.0, True, problem.answer), problem.prompt
        wrong = mutated(problem.answer)
        assert not verify(problem, solved(problem, wrong)).correct, (problem.prompt, wrong)
        for near in mutated_within(problem):
            assert not verify(problem, solved(problem, near)).correct, (problem.prompt, near)
        assert verify(problem, problem.solution.replace(ANSWER_MARKER, "")).extracted is None
    forms = {problem.metadata["canonical"] for problem in train}
    assert not forms & {problem.metadata["canonical"] for problem in held_out}


def mutated(answer: str) -> str:
    """An answer of the same type that is wrong, whatever the problem."""
    if answer in ("true", "false"):
        return "false" if answer == "true" else "true"
    if answer.startswith("["):
        return json.dumps([*json.loads(answer), 99])
    if answer in "NESW":
        return "NESW"[("NESW".index(answer) + 1) % 4]
    if "," in answer:
        x, y = answer.split(",")
        return f"{x},{int(y) + 1}"
    return str(int(answer) + 1)


def mutated_within(problem: Problem) -> list[str]:
    """Wrong lists of nodes or edges that exist: one missing, one too many, one twice, and a swap that must be wrong."""
    query = problem.metadata["check"].get("query")
    if not problem.answer.startswith("[") or query is None:
        return []
    answer, graph = json.loads(problem.answer), PlainGraph.of(problem.metadata["check"]["graph"])
    found = [[*answer, answer[0]]] if answer else []
    if query != "cycle":  # a part of a cycle may be one too
        found.append([*answer, 0 if not answer or isinstance(answer[0], int) else list(graph.edges[0][:2])])
        found += [answer[:-1]] if answer else []
    if query in ("topological_order", "two_coloring") and graph.edges:
        u, v, _ = graph.edges[0]
        swapped = list(answer)
        if query == "topological_order":
            swapped = [{u: v, v: u}.get(node, node) for node in answer]
        else:
            swapped[u] = answer[v]
        found.append(swapped)
    return [json.dumps(each) for each in found]


@pytest.mark.parametrize("name", NAMES)
def test_problems_depend_on_the_key_alone_and_cells_follow_each_other(name: str) -> None:
    first, second = (build_sources([task(name)], "train", seed=3) for _ in range(2))
    assert [first.problem(i) for i in range(40)] == [second.problem(i) for i in reversed(range(40))][::-1]
    cells = FAMILIES[name](FAMILIES[name].params_type()).cells
    found = Counter(json.dumps(p.metadata["cell"], sort_keys=True) for p in first.problems(0, 2 * len(cells)))
    assert set(found.values()) == {2} and len(found) == len(cells), "stratified by cell"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["answer_tag", "boxed", "last_line"])
def test_natural_wording_has_the_same_problems_in_english(name: str, place: str) -> None:
    compact = build_sources([task(name)], "train", seed=3).problems(0, 60)
    natural = build_sources([task(name, place, wording="natural")], "train", seed=3).problems(0, 60)
    for one, other in zip(compact, natural, strict=True):
        assert one.metadata["canonical"] == other.metadata["canonical"] and one.answer == other.answer
        assert other.prompt.count(".") >= 2 and len(other.prompt) > len(one.prompt)
        assert other.solution is not None
        assert verify(other, in_format(other.solution, place)).correct


@pytest.mark.parametrize("name", NAMES)
def test_held_out_structures_are_not_trained_on(name: str) -> None:
    one = task(name).model_copy(update={"held_out": "structure", "held_out_fraction": 0.3})
    generator = build_sources([one], "train", 0).sources[0]._generator  # type: ignore[attr-defined]
    sets: list[set[str]] = []
    for split in ("train", "held_out"):
        source = build_sources([one], split, 0).sources[0]  # type: ignore[arg-type]
        drawn: set[str] = set()
        for index in range(200):
            problem = source.problem(index)
            for attempt in range(2000):
                draft = source._draw(index, attempt)  # type: ignore[attr-defined]
                if draft.worked.prompt == problem.prompt:
                    drawn.add(draft.structure or "")
                    break
        sets.append(drawn)
    assert generator.name == name and all(sets) and not sets[0] & sets[1]


# Independent implementations, from the prompts alone


def count_again(prompt: str) -> int:
    start, *steps, asked = prompt.strip().split("|")
    numbers = [int(n) for n in start.removeprefix("pipe ").split()]
    for step in steps:
        kept = []
        for x in numbers:
            word, _, rest = step.partition(" ")
            if step == "even" or step == "odd":
                kept += [x] * (x % 2 == (step == "odd"))
            elif word in ("has", "not"):
                kept += [x] * ((rest in str(x)) == (word == "has"))
            elif word == "mod3":
                kept += [x] * (x % 3 == int(rest))
            elif step == "rev":
                kept.append(int("".join(reversed(str(x)))))
            elif step == "sq":
                kept.append(x**2)
            elif step == "dsum":
                kept.append(sum(int(digit) for digit in str(x)))
            else:
                sign, k = step[0], int(step[1:])
                if sign == "/":
                    kept += [x] * (x // k * k == x)
                elif sign in "<>":
                    kept += [x] * (x > k if sign == ">" else x < k)
                else:
                    kept.append(x + k if sign == "+" else x * k if sign == "*" else x - x // k * k)
        assert kept != numbers, "a step that changes nothing"
        numbers = kept
    ordered = sorted(numbers)
    answers = {"count": len(ordered), "sum": sum(ordered), "max": ordered[-1], "min": ordered[0]}
    return (answers | {"distinct": len(set(ordered)), "range": ordered[-1] - ordered[0]})[asked]


def test_pipelines_have_the_answers_of_another_implementation() -> None:
    for problem in build_sources([task("pipeline_counting")], "train", seed=5).problems(0, 600):
        assert count_again(problem.prompt) == int(problem.answer), problem.prompt


def move_again(prompt: str) -> str:
    _, *parts, question = prompt.strip().split("|")
    at: dict[str, complex] = {}
    facing: dict[str, complex] = {}
    ways = {"N": 1j, "E": 1, "S": -1j, "W": -1}
    for part in parts:
        name, _, what = part.partition(" ")
        if name not in at:
            x, y = what[:-1].split(",")
            at[name], facing[name] = complex(int(x), int(y)), ways[what[-1]]
        elif what in ("l", "r", "u"):
            facing[name] *= {"l": 1j, "r": -1j, "u": -1}[what]
        elif what[0] == "=":
            facing[name] = ways[what[1]]
        elif what[0] in ways:
            at[name] += ways[what[0]] * int(what[1:])
        else:
            at[name] += facing[name] * int(what[1:]) * (1 if what[0] == "f" else -1)
        assert 0 <= at[name].real < 20 and 0 <= at[name].imag < 20
    name, asked = question[1:].split()
    if asked == "pos":
        return f"{round(at[name].real)},{round(at[name].imag)}"
    return next(letter for letter, way in ways.items() if way == facing[name])


def test_particles_end_where_another_implementation_says() -> None:
    for problem in build_sources([task("grid_particles")], "train", seed=5).problems(0, 600):
        assert move_again(problem.prompt) == problem.answer, problem.prompt


class Brute:
    """A graph from a prompt, and answers by trying everything."""

    def __init__(self, text: str) -> None:
        kind, nodes, *edges = text.split()
        self.directed, self.nodes = kind == "d", range(int(nodes))
        self.weight: dict[tuple[int, int], int] = {}
        for edge in edges:
            ends, _, weight = edge.partition(":")
            u, v = map(int, ends.split(">" if self.directed else "-"))
            self.weight[u, v] = int(weight or 1)
            if not self.directed:
                self.weight[v, u] = int(weight or 1)
        self.length = self.floyd(dict.fromkeys(self.weight, 1))
        self.lightest = self.floyd(self.weight)

    def floyd(self, weight: dict[tuple[int, int], int]) -> dict[tuple[int, int], float]:
        found = {(u, v): 0 if u == v else weight.get((u, v), float("inf")) for u in self.nodes for v in self.nodes}
        for k, i, j in itertools.product(self.nodes, repeat=3):
            found[i, j] = min(found[i, j], found[i, k] + found[k, j])
        return found

    def parts(self, without_node: int | None = None, without: tuple[int, int] | None = None) -> int:
        left = [node for node in self.nodes if node != without_node]
        pairs = {pair for pair in self.weight if without is None or set(pair) != set(without)}
        label = {node: node for node in left}
        for _ in left:
            for u, v in pairs:
                if u in label and v in label:
                    label[u] = label[v] = min(label[u], label[v])
        return len(set(label.values()))

    def edges(self) -> list[tuple[int, int]]:
        return [pair for pair in self.weight if self.directed or pair[0] < pair[1]]

    def bipartite(self) -> bool:
        return any(
            all(colors[u] != colors[v] for u, v in self.weight)
            for colors in itertools.product((0, 1), repeat=len(self.nodes))
        )

    def largest(self, joined: bool) -> int:
        return max(
            size
            for size in range(len(self.nodes) + 1)
            for chosen in itertools.combinations(self.nodes, size)
            if all((pair in self.weight) is joined for pair in itertools.combinations(chosen, 2))
        )

    def matching(self) -> int:
        edges = self.edges()
        most = 0
        for size in range(1, len(self.nodes) // 2 + 1):
            if any(len(set(itertools.chain(*chosen))) == 2 * size for chosen in itertools.combinations(edges, size)):
                most = size
        return most

    def tree(self) -> int:
        best = None
        edges = self.edges()
        for chosen in itertools.combinations(edges, len(self.nodes) - 1):
            near = {pair for u, v in chosen for pair in ((u, v), (v, u))}
            label = {node: node for node in self.nodes}
            for _ in self.nodes:
                for u, v in near:
                    label[u] = label[v] = min(label[u], label[v])
            if len(set(label.values())) == 1:
                weight = sum(self.weight[pair] for pair in chosen)
                best = weight if best is None else min(best, weight)
        assert best is not None
        return best

    def flow(self, source: int, sink: int) -> int:
        """The least cut, over all sets of nodes with the source."""
        others = [node for node in self.nodes if node not in (source, sink)]
        cuts = []
        for size in range(len(others) + 1):
            for chosen in itertools.combinations(others, size):
                inside = {source, *chosen}
                cuts.append(sum(w for (u, v), w in self.weight.items() if u in inside and v not in inside))
        return min(cuts)


def graph_again(prompt: str) -> Any:
    """The answer to a query; the size of the best for witnesses; None: only its check says."""
    text, asked = prompt.strip().removeprefix("graph ").split("|")
    query, *given = asked.split()
    g, arguments = Brute(text), [int(n) for n in given]
    first, last, *_ = [*arguments, 0, 0]
    acyclic = all(g.length[v, u] == float("inf") for u, v in g.weight) if g.directed else None
    answers: dict[str, Any] = {
        "acyclic": lambda: acyclic,
        "bipartite": g.bipartite,
        "bridges": lambda: sum(g.parts(without=edge) > g.parts() for edge in g.edges()),
        "clique": lambda: g.largest(joined=True),
        "components": g.parts,
        "cut_nodes": lambda: sum(g.parts(without_node=node) > g.parts() for node in g.nodes),
        "degree": lambda: sum(u == first for u, _ in g.weight),
        "diameter": lambda: max(g.length.values()),
        "distance": lambda: g.length[first, last],
        "in_degree": lambda: sum(v == first for _, v in g.weight),
        "independent_set": lambda: g.largest(joined=False),
        "lightest_distance": lambda: g.lightest[first, last],
        "lightest_path": lambda: g.lightest[first, last],
        "matching": g.matching,
        "max_flow": lambda: g.flow(first, last),
        "out_degree": lambda: sum(u == first for u, _ in g.weight),
        "reachable": lambda: g.length[first, last] < float("inf"),
        "shortest_path": lambda: g.length[first, last],
        "spanning_tree": g.tree,
        "strong_components": lambda: len(
            {tuple(v for v in g.nodes if g.length[u, v] + g.length[v, u] < float("inf")) for u in g.nodes}
        ),
        "tree_weight": g.tree,
        "triangles": lambda: sum(
            all(pair in g.weight for pair in itertools.combinations(three, 2))
            for three in itertools.combinations(g.nodes, 3)
        ),
        "within": lambda: sum(g.length[first, v] <= last for v in g.nodes),
    }
    return answers[query]() if query in answers else None


def test_graph_queries_have_the_answers_of_another_implementation() -> None:
    one = task("graph_queries", nodes={"min": 4, "max": 7, "tail": 0})
    compared = Counter[str]()
    for problem in build_sources([one], "train", seed=5).problems(0, 500):
        again, query = graph_again(problem.prompt), problem.metadata["check"]["query"]
        if again is None:
            continue
        answer = json.loads(problem.answer)
        found = problem.metadata["check"]["optimum"] if isinstance(answer, list) else answer
        assert found == again, problem.prompt
        compared[query] += 1
    assert len(compared) >= 22 and min(compared.values()) >= 5
    assert QUESTIONS.keys() - compared.keys() == {"cycle", "neighbors", "topological_order", "two_coloring"}


def test_any_witness_is_correct_and_worse_ones_are_not() -> None:
    square = PlainGraph(4, False, True, ((0, 1, 1), (0, 3, 1), (1, 2, 1), (2, 3, 1)))
    for path in ([0, 1, 2], [0, 3, 2]):
        assert witness_problem(square, "shortest_path", [0, 2], 2, path) is None
    for wrong in ([], [0, 2], [0, 1, 0, 3, 2], [2, 1, 0], [0, 1, 2, 3], [0, -1, 2], [0, True, 2], [0, 1.0, 2]):
        assert witness_problem(square, "shortest_path", [0, 2], 2, wrong), wrong
    assert witness_problem(square, "cycle", [], 0, [2, 3, 0, 1]) is None
    assert witness_problem(square, "cycle", [], 0, [0, 1]) and witness_problem(square, "cycle", [], 0, [0, 1, 2])
    assert witness_problem(square, "two_coloring", [], 0, [1, 0, 1, 0]) is None
    assert witness_problem(square, "two_coloring", [], 0, [1, 0, 1, 1])
    assert witness_problem(square, "spanning_tree", [], 3, [[1, 0], [1, 2], [3, 2]]) is None
    assert witness_problem(square, "spanning_tree", [], 3, [[0, 1], [1, 0], [3, 2]])
    assert witness_problem(square, "matching", [], 2, [[1, 0], [2, 3]]) is None
    assert witness_problem(square, "matching", [], 2, [[1, 0], [1, 2]])
    assert witness_problem(square, "matching", [], 2, [[1, 0]]) and witness_problem(square, "matching", [], 2, [1, 0])
    assert witness_problem(square, "independent_set", [], 2, [3, 1]) is None
    assert witness_problem(square, "clique", [], 2, [3, 1]) and witness_problem(square, "clique", [], 2, [2])
    line = PlainGraph(3, True, False, ((0, 1, 1), (0, 2, 1)))
    assert witness_problem(line, "topological_order", [], 0, [0, 2, 1]) is None
    assert witness_problem(line, "topological_order", [], 0, [1, 0, 2])
    assert witness_problem(line, "neighbors", [0], 0, [2, 1]) is None


def test_shaped_rewards_lie_between_their_bounds() -> None:
    problem = build_sources([task("pipeline_counting", reward="shaped")], "train", 0).problem(0)
    right = int(problem.answer)
    rewards = {
        "no answer": verify(problem, "I do not know"),
        "words": verify(problem, "#### many"),
        "far": verify(problem, f"#### {right * 1000 + 5000}"),
        "near": verify(problem, f"#### {right + 1}"),
        "then more": verify(problem, f"#### {right}\nor so"),
        "right": verify(problem, f"#### {right}"),
    }
    values = [reward.value for reward in rewards.values()]
    assert values == sorted(values) and values[0] == -0.4 and values[-2:] == [1.0, 1.1]
    assert [name for name, reward in rewards.items() if reward.correct] == ["then more", "right"]


def test_answers_are_read_exactly() -> None:
    assert integer_closeness(7, "7") == integer_closeness(7, "+7") == 1.0
    assert integer_closeness(7, "7.0") is integer_closeness(7, "7 apples") is integer_closeness(7, "9" * 19) is None
    position = FAMILIES["grid_particles"].closeness
    assert position("3,4", {"size": 20}, "(3, 4)") == 1.0 and position("3,4", {"size": 20}, "3 4") is None
    assert position("N", {}, "north") == position("N", {}, "n") == 1.0 and position("N", {}, "up") is None
    graph = FAMILIES["graph_queries"].closeness
    assert graph("true", {}, "true") == 1.0 and graph("true", {}, "1") is graph("true", {}, "yes") is None
    assert graph("[1]", {}, "[" * 100_000) is None, "text that no parser reads"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "counting"}, "tasks\\[0\\].name: unknown family 'counting'; allowed are graph_queries"),
        ({"params": {"filter": [1]}}, "tasks\\[0\\].params.filter: .*; allowed are wording"),
        ({"name": "graph_queries", "params": {"queries": ["colors"]}}, "found 'colors'; allowed: acyclic, bipartite"),
        (
            {"name": "graph_queries", "params": {"queries": ["acyclic"], "directed": [False]}},
            "no combination of the axes",
        ),
        ({"name": "graph_queries", "params": {"nodes": {"min": 2, "max": 9}}}, "found 2 to 9 nodes; allowed: 3 to 25"),
        ({"name": "grid_particles", "params": {"particles": [4], "steps": [2]}}, "no combination of the axes"),
    ],
)
def test_wrong_params_are_named(changes: dict[str, Any], message: str) -> None:
    one = TaskConfig.model_validate({"kind": "procedural", "name": "pipeline_counting", **changes})
    with pytest.raises(ConfigError, match=message):
        build_sources([one], "train", 0)


def test_a_wording_has_its_own_place_for_the_answer() -> None:
    for params, place in (({"wording": "natural"}, None), ({}, "boxed")):
        with pytest.raises(ValueError, match=r"needs .answer_format. with params\.wording: natural"):
            TaskConfig.model_validate(
                {"kind": "procedural", "name": "grid_particles", "params": params, "answer_format": place}
            )
    (line,) = verifier_problems([TaskConfig(name="gcd", verifier="procedural")])
    assert (
        "'procedural' verifies procedural problems only; allowed for kind generated: code, math, reasoning_gym" in line
    )
