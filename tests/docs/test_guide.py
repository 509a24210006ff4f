"""What docs/guide.md shows of tasks is accepted, and its evaluation sets are what they are said to be."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from megatron_tlt.cli.preflight import load_checked
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.tasks import build_sources
from megatron_tlt.tasks.mixture import evaluation_problems
from megatron_tlt.tasks.pool import identity_of
from megatron_tlt.tasks.procedural import FAMILIES
from megatron_tlt.tasks.types import Problem
from tests.helpers.launch import REPOSITORY

BLOCKS = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "guide.md").read_text(), re.DOTALL)
(SHOWN,) = (found for block in BLOCKS if "name: larger" in block for found in [yaml.safe_load(block)])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TltConfig:
    """The example in a config that is otherwise the quickstart's, after all checks."""
    overrides = [f"tasks={json.dumps(SHOWN['tasks'])}", f"evaluation.sets={json.dumps(SHOWN['evaluation']['sets'])}"]
    overrides.append(f"run.dir={tmp_path_factory.mktemp('run')}")
    return load_checked(REPOSITORY / "launch" / "quickstart-deterministic.yaml", overrides)


def size_of(problem: Problem) -> int:
    """The axis that the example makes larger."""
    cell = problem.metadata["cell"]
    if problem.source == "graph_queries":
        return int(problem.metadata["check"]["graph"]["nodes"])
    return int(cell["filters"] if problem.source == "pipeline_counting" else cell["steps"])


def test_the_sets_share_no_problem_and_no_structure_with_the_training(config: TltConfig) -> None:
    trained = build_sources(config.tasks, "train", 0).problems(0, 1500)
    assert {problem.source for problem in trained} == set(FAMILIES)
    largest = {name: max(size_of(problem) for problem in trained if problem.source == name) for name in FAMILIES}
    forms = {identity_of(problem) for problem in trained}
    sets = {each.name: evaluation_problems(each.tasks, 60, 0) for each in config.evaluation.sets}
    for name, problems in sets.items():
        assert len(problems) == 60 and not forms & {identity_of(problem) for problem in problems}, name
    assert all(size_of(problem) > largest[problem.source] for problem in sets["larger"])
    assert {problem.source for problem in sets["larger"]} == set(FAMILIES)
    kinds = {_kinds_of(problem) for problem in trained if problem.source == "pipeline_counting"}
    assert not kinds & {_kinds_of(problem) for problem in sets["structures"]}


def _kinds_of(problem: Problem) -> str:
    """The kinds of a counting problem's steps in their normal order, and what is asked for."""
    _, _, operations, asked = json.loads(problem.metadata["canonical"])
    return json.dumps([[kind for kind, _ in operations], asked])
