"""Cells of the procedural families: which exist, and how many problems each of them has."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks import build_sources

EACH = 12
"""Problems of each cell, if they are alike."""


def task(name: str, **params: Any) -> TaskConfig:
    return TaskConfig.model_validate({"kind": "procedural", "name": name, "params": params})


def counts(one: TaskConfig) -> Counter[str]:
    """How many held-out problems each cell has."""
    mixture = build_sources([one], "held_out", 1)
    cells = mixture.sources[0]._generator.cells  # type: ignore[attr-defined]
    found = Counter({json.dumps(cell, sort_keys=True): 0 for cell in cells})
    for problem in mixture.problems(0, EACH * len(cells)):
        found[json.dumps(problem.metadata["cell"], sort_keys=True)] += 1
    return found


def test_a_cell_without_a_held_out_structure_leaves_its_share_to_all_others() -> None:
    one = task("grid_particles", steps=[2, 4, 6])
    found = counts(one.model_copy(update={"held_out": "structure"}))
    empty = [cell for cell, count in found.items() if not count]
    assert 0 < len(empty) < len(found) / 4, "otherwise another case is to be found"
    others = [count for count in found.values() if count]
    assert min(others) >= EACH // 2 and max(others) < 2 * EACH, "some have few held-out structures"
    alike = counts(one).values()  # prompts are held out of every cell
    assert max(alike) - min(alike) <= 2


@pytest.mark.parametrize("source", ["list", "range"])
def test_more_numbers_than_exist_are_refused(source: str) -> None:
    refused = r"tasks\[0\]\.params: .*numbers\.max is 12; from 0 to max_value there are 10 numbers; allowed: at most"
    with pytest.raises(ConfigError, match=refused):
        build_sources([task("pipeline_counting", max_value=9, source=source)], "train", 1)
    most = {"min": 10, "max": 10}
    problems = build_sources([task("pipeline_counting", max_value=9, source=source, numbers=most)], "train", 1)
    for problem in problems.problems(0, 20):
        numbers = problem.prompt.partition("|")[0].removeprefix("pipe ").split()
        assert sorted(map(int, numbers)) == list(range(10))
