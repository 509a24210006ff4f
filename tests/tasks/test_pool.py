"""Data budgets and tiers: finite pools, each problem once per epoch, in the shares that were asked for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import _task
from megatron_tlt.tasks import build_sources
from megatron_tlt.tasks.mixture import evaluation_problems
from megatron_tlt.tasks.pool import asked_digest, digest_of, identity_of, tier_of

COUNTING = {"kind": "procedural", "name": "pipeline_counting"}


def task(**fields: Any) -> TaskConfig:
    return TaskConfig.model_validate({**COUNTING, **fields})


@pytest.mark.parametrize("fields", [{}, {"kind": "generated", "name": "chain_sum"}], ids=["procedural", "generated"])
def test_a_budget_is_a_pool_of_different_problems_used_in_epochs(fields: dict[str, Any]) -> None:
    mixture = build_sources([task(**fields, budget=30)], "train", 4)
    epochs = [mixture.problems(first, 30) for first in (0, 30, 60)]
    uids = [[problem.uid for problem in epoch] for epoch in epochs]
    assert set(uids[0]) == set(uids[1]) == set(uids[2]) and len(set(uids[0])) == 30
    assert uids[0] != uids[1], "shuffled anew"
    assert len({identity_of(problem) for problem in epochs[0]}) == 30
    assert all(problem.recurs for problem in epochs[0])
    assert [p.uid for p in build_sources([task(**fields, budget=30)], "train", 4).problems(30, 30)] == uids[1]
    held_out = build_sources([task(**fields, budget=30)], "held_out", 4).problems(0, 60)
    assert len({problem.uid for problem in held_out}) == 60, "the held-out set has no budget"


def test_a_budget_beyond_what_exists_is_refused() -> None:
    few = {"kind": "generated", "name": "gcd", "params": {"sizes": {"min": 3, "max": 3}}, "budget": 100}
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.budget: found 100; 5000 draws have \d different problems"):
        build_sources([TaskConfig.model_validate(few)], "train", 0)


def test_a_files_budget_is_a_sample_of_its_rows(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1", "answer": f"#### {n + 1}"} for n in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"kind": "file", "name": "f", "path": path, "held_out_fraction": 0.2}
    mixture = build_sources([TaskConfig.model_validate({**fields, "budget": 10})], "train", 1)
    first, second = ({p.prompt for p in mixture.problems(at, 10)} for at in (0, 10))
    assert first == second and len(first) == 10
    with pytest.raises(
        ConfigError, match=r"^tasks\[0\]\.budget: found 60; .*rows\.jsonl has \d+ rows to train on; allowed"
    ):
        build_sources([TaskConfig.model_validate({**fields, "budget": 60})], "train", 1)


def test_a_file_of_an_evaluation_set_has_a_budget_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1", "answer": f"#### {n + 1}"}) + "\n" for n in range(50)))
    one = TaskConfig(kind="file", name="f", path=path, budget=10)
    found = evaluation_problems([one], 50, 1)
    assert len(found) == 10 and found == evaluation_problems([one], 50, 1)
    with pytest.raises(
        ConfigError, match=r"^tasks\[0\]\.budget: found 60; .* has 50 rows to test on; allowed: at most"
    ):
        evaluation_problems([one.model_copy(update={"budget": 60})], 50, 1)


def tiers_file(path: Path, one: TaskConfig, count: int = 60) -> Path:
    """Every third problem is easy, medium, hard."""
    source = build_sources([one], "train", 7).sources[0]
    rows = [
        {"index": i, "digest": digest_of(source.problem(i)), "passed": (8, 4, 1)[i % 3], "samples": 8}
        for i in range(count)
    ]
    path.write_text(json.dumps({"tasks": {one.name: rows}}))
    return path


def test_a_mixture_has_the_tiers_in_its_shares(tmp_path: Path) -> None:
    file = tiers_file(tmp_path / "tiers.json", task())
    one = task(budget=10, tier_file=file, tier_mix={"easy": 1, "medium": 1, "hard": 1})
    problems = build_sources([one], "train", 7).problems(0, 10)
    assert sorted(Counter(problem.metadata["tier"] for problem in problems).values()) == [3, 3, 4]
    easy = build_sources([task(budget=20, tier_file=file, tier_mix={"easy": 2.5})], "train", 7).problems(0, 20)
    assert {problem.metadata["tier"] for problem in easy} == {"easy"}


def test_an_evaluation_set_has_held_out_problems_of_a_tier(tmp_path: Path) -> None:
    source = build_sources([task()], "held_out", 7).sources[0]
    rows = [{"index": i, "digest": digest_of(source.problem(i)), "passed": i % 2, "samples": 1} for i in range(20)]
    file = tmp_path / "held-out.json"
    file.write_text(json.dumps({"split": "held_out", "tasks": {task().name: rows}}))
    one = task(budget=6, tier_file=file, tier_mix={"easy": 1})
    found = evaluation_problems([one], 6, 7)
    assert {identity_of(p) for p in found} == {identity_of(source.problem(i)) for i in range(1, 13, 2)}
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.tier_file: .* has held_out problems, not train ones"):
        build_sources([one], "train", 7)


def test_what_is_wrong_with_tiers_is_named(tmp_path: Path) -> None:
    file = tiers_file(tmp_path / "tiers.json", task())

    def build(seed: int = 7, **fields: Any) -> None:
        given = {"budget": 10, "tier_file": file, "tier_mix": {"hard": 1}}
        build_sources([task(**{**given, **fields})], "train", seed)

    build()
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.tier_mix\.hard: found a share of 21 problems; .* has 20"):
        build(budget=21)
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.tier_file: problem 2 of .* is another one than the task's"):
        build(seed=8)
    with pytest.raises(
        ConfigError, match=r"tier_file: .* has nothing about 'grid_particles'; it has pipeline_counting"
    ):
        build(name="grid_particles")
    with pytest.raises(ConfigError, match=r"tier_file: cannot read .*none\.json: No such file"):
        build(tier_file=tmp_path / "none.json")
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "has no 'tasks'"),
        ('{"tasks": {"pipeline_counting": [{"index": 1}]}}', "a row lacks index, digest, passed or samples"),
        (
            '{"tasks": {"pipeline_counting": [{"index": 1, "digest": "", "passed": 9, "samples": 8}]}}',
            "problem 1: found 9 of 8 passed; allowed: an index from 0, at least one sample, and from 0 to all",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            build()


def test_a_file_with_a_problem_twice_is_refused(tmp_path: Path) -> None:
    file = tiers_file(tmp_path / "tiers.json", task(), 12)
    found = json.loads(file.read_text())
    found["tasks"]["pipeline_counting"].append(found["tasks"]["pipeline_counting"][2])
    file.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"tier_file: .*'pipeline_counting': problem 2 is there twice; allowed: each"):
        build_sources([task(budget=3, tier_file=file, tier_mix={"hard": 1})], "train", 7)


def test_a_file_of_problems_that_were_asked_otherwise_is_refused(tmp_path: Path) -> None:
    natural = {"params": {"wording": "natural"}, "answer_format": "boxed"}
    asked = task(**natural, chat=True)
    file = tiers_file(tmp_path / "tiers.json", asked, 12)
    pool = {"budget": 3, "tier_file": file, "tier_mix": {"hard": 1}}
    build_sources([task(**natural, **pool)], "train", 7)  # an earlier release did not say how they were asked
    found = json.loads(file.read_text())
    source = build_sources([asked], "train", 7).sources[0]
    for row in found["tasks"]["pipeline_counting"]:
        row["asked"] = asked_digest(source.problem(row["index"]))
    file.write_text(json.dumps(found))
    build_sources([task(**natural, chat=True, **pool)], "train", 7)
    others = [
        natural,
        {**natural, "answer_format": "last_line", "chat": True},
        {**natural, "instruction": "Go.", "chat": True},
        {**natural, "system_prompt": "You count.", "chat": True},
        {"params": {"wording": "compact"}, "chat": True},
    ]
    for other in others:
        with pytest.raises(ConfigError, match=r"tier_file: problem 2 of .* was asked otherwise than the task does"):
            build_sources([task(**other, **pool)], "train", 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tier_mix": {"easy": 1}, "budget": 3}, "found tier_mix without tier_file; allowed: both"),
        ({"tier_file": "t.json"}, "found tier_file without tier_mix; allowed: both"),
        ({"tier_file": "t.json", "tier_mix": {"easy": 1}}, "tier_mix needs at least one tier, and 'budget'"),
        ({"kind": "generated", "name": "gcd", "held_out": "structure"}, "held_out: structure needs kind procedural"),
        ({"tier_file": "t.json", "tier_mix": {"simple": 1}, "budget": 3}, "simple"),
        (
            {"kind": "file", "name": "f", "path": "f.jsonl", "tier_file": "t", "tier_mix": {"easy": 1}, "budget": 3},
            "takes no tier_mix",
        ),
    ],
)
def test_keys_of_pools_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**fields)


def test_tasks_of_one_family_have_one_way_to_hold_out() -> None:
    with pytest.raises(ConfigError, match=r"tasks\[1\]\.held_out: structure, but an earlier 'pipeline_counting'"):
        build_sources([task(), task(held_out="structure")], "train", 0)


def test_tiers_are_thirds() -> None:
    assert [tier_of(passed / 6) for passed in range(7)] == ["hard"] * 3 + ["medium"] + ["easy"] * 3


def test_a_budget_does_not_make_another_warm_up() -> None:
    assert _task(task(budget=5)) == _task(task()) != _task(task(held_out="structure"))
    assert not {"budget", "tier_mix", "tier_file", "held_out"} & _task(task()).keys(), "as earlier releases wrote it"
