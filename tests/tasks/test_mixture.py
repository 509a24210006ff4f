"""The mixture: disjoint splits, exact proportions, epochs over files, random access."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.evaluation import EvaluationSetConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks import GENERATORS, Problem, build_sources
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.mixture import evaluation_problems, shares
from megatron_tlt.tasks.pool import identity_of
from megatron_tlt.tasks.sources import GeneratedSource
from megatron_tlt.tasks.split_rules import split_violations

ALL = [TaskConfig(name=name) for name in sorted(GENERATORS)]


def _file(path: Path, prompts: list[str]) -> TaskConfig:
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": "1"}} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskConfig(kind="file", name=path.stem, path=path)


def test_splits_share_no_prompt_whatever_the_seed() -> None:
    train = {p.prompt for seed in (0, 1) for p in build_sources(ALL, "train", seed).problems(0, 1500)}
    held_out = {p.prompt for seed in (0, 2) for p in build_sources(ALL, "held_out", seed).problems(0, 300)}
    assert len(train) > 1000 and len(held_out) > 250
    assert not train & held_out


def test_uids_are_unique_over_splits() -> None:
    uids = [p.uid for split in ("train", "held_out") for p in build_sources(ALL, split, 0).problems(0, 400)]
    assert len(set(uids)) == len(uids)


def test_seeds_give_other_problems() -> None:
    first, second = (build_sources(ALL, "train", seed).problems(0, 50) for seed in (0, 1))
    assert [p.prompt for p in first] != [p.prompt for p in second]


def test_random_access_equals_sequential_access() -> None:
    sequential = build_sources(ALL, "train", 0).problems(0, 60)
    jumping = build_sources(ALL, "train", 0)
    jumping.problem(5000)
    assert [jumping.problem(index) for index in (59, 0, 30)] == [sequential[59], sequential[0], sequential[30]]


def test_weights_are_proportions() -> None:
    tasks = [TaskConfig(name="chain_sum", weight=3.0), TaskConfig(name="gcd", weight=1.0)]
    sources = Counter(p.source for p in build_sources(tasks, "train", 0).problems(0, 1000))
    assert sources == {"chain_sum": 750, "gcd": 250}


def test_one_generator_twice_gives_two_sources() -> None:
    easy = TaskConfig(name="chain_sum", params={"sizes": {"min": 2, "max": 2}})
    hard = TaskConfig(name="chain_sum", params={"sizes": {"min": 9, "max": 9}})
    problems = build_sources([easy, hard], "train", 0).problems(0, 100)
    assert {p.source for p in problems} == {"chain_sum#0", "chain_sum#1"}
    assert all((p.prompt.count("+") + p.prompt.count("-") == 1) == (p.source == "chain_sum#0") for p in problems)


def test_one_generator_with_two_held_out_fractions_is_refused() -> None:
    tasks = [TaskConfig(name="gcd"), TaskConfig(name="gcd", held_out_fraction=0.2)]
    with pytest.raises(ConfigError, match=r"tasks\[1\]\.held_out_fraction: 0\.2.*0\.1"):
        build_sources(tasks, "train", 0)


def test_held_out_gives_distinct_problems_from_either_split() -> None:
    problems = build_sources(ALL, "train", 0).held_out(200)
    assert len({p.prompt for p in problems}) == len(problems) == 200
    assert problems == build_sources(ALL, "held_out", 0).held_out(200)
    assert all("/held_out/" in p.uid for p in problems)


def test_a_task_without_held_out_prompts_is_refused() -> None:
    task = TaskConfig(name="gcd", params={"sizes": {"min": 2, "max": 2}}, held_out_fraction=0.001)
    with pytest.raises(ConfigError, match=r"task gcd: none of .* held_out_fraction 0.001"):
        build_sources([task], "held_out", 0).problem(0)


def test_a_file_is_read_once_per_epoch_in_a_new_order(tmp_path: Path) -> None:
    mixture = build_sources([_file(tmp_path / "p.jsonl", [f"q{i}" for i in range(50)])], "train", 0)
    rows = len(mixture.sources[0])  # type: ignore[arg-type]
    epochs = [[p.uid for p in mixture.problems(epoch * rows, rows)] for epoch in range(3)]
    assert all(len(set(epoch)) == rows for epoch in epochs)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_file_in_a_mixture_is_read_evenly(tmp_path: Path) -> None:
    file = _file(tmp_path / "p.jsonl", [f"q{i}" for i in range(60)])
    mixture = build_sources([file, TaskConfig(name="gcd", weight=2.0)], "train", 0)
    counts = Counter(p.uid for p in mixture.problems(0, 3000) if p.source == "p")
    assert max(counts.values()) - min(counts.values()) <= 1


def test_held_out_of_a_small_file_ends(tmp_path: Path) -> None:
    mixture = build_sources([_file(tmp_path / "p.jsonl", [f"q{i}" for i in range(100)])], "train", 0)
    problems = mixture.held_out(200)
    assert len(problems) + len(mixture.sources[0]) == 100  # type: ignore[arg-type]
    assert 0 < len(problems) < 30


def test_held_out_path_keeps_its_prompts_out_of_training(tmp_path: Path) -> None:
    train = _file(tmp_path / "train.jsonl", [f"q{i}" for i in range(10)])
    _file(tmp_path / "test.jsonl", ["q3", "q4", "other"])
    task = train.model_copy(update={"held_out_path": tmp_path / "test.jsonl"})
    assert {p.prompt for p in build_sources([task], "held_out", 0).held_out(9)} == {"q3", "q4", "other"}
    trained = {p.prompt for p in build_sources([task], "train", 0).problems(0, 100)}
    assert trained == {f"q{i}" for i in range(10)} - {"q3", "q4"}


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    task = _file(tmp_path / "p.jsonl", ["only"])
    with pytest.raises(ConfigError, match=r"p\.jsonl: no held_out problem among 1 rows"):
        build_sources([task], "held_out", 0)
    whole = task.model_copy(update={"held_out_path": tmp_path / "p.jsonl"})
    with pytest.raises(ConfigError, match="the two sets must differ"):
        build_sources([whole], "train", 0)


@settings(max_examples=60)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.integers(12, 500))
def test_shares_add_up_and_follow_the_weights(weights: list[float], total: int) -> None:
    counts = shares(weights, total)
    assert sum(counts) == total and min(counts) >= 1
    for weight, count in zip(weights, counts, strict=True):
        exact = 1 + (total - len(weights)) * weight / sum(weights)
        assert abs(count - exact) < 1 + 1e-6


def _characters(problems: Sequence[Problem]) -> list[int | str]:
    return [len(problem.prompt) for problem in problems]


def test_prompts_over_the_limit_are_named_all_at_once(tmp_path: Path) -> None:
    files = [_file(tmp_path / f"{name}.jsonl", ["q" * 3, "long" * 3, "long" * 4]) for name in ("a", "b")]
    tasks = [file.model_copy(update={"held_out_fraction": 1e-9}) for file in files]
    with pytest.raises(ConfigError) as caught:
        build_sources(tasks, "train", 0, PromptLimit(10, False, _characters))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines] == ["2", "3", "2", "3"]
    assert all("; allowed by rollout.max_prompt_tokens: 10 (rollout.filter_overlong_prompts: true" in x for x in lines)


def test_prompts_over_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    prompts = [f"q{i}" + "+" * (i % 4) for i in range(100, 140)]
    task = _file(tmp_path / "p.jsonl", prompts).model_copy(update={"held_out_fraction": 0.3})
    limit = PromptLimit(6, True, _characters)
    train = build_sources([task], "train", 0, limit)
    held_out = train.held_out(40)
    kept = {problem.prompt for problem in [*train.problems(0, 80), *held_out]}
    assert kept == {prompt for prompt in prompts if len(prompt) <= 6} and 0 < len(held_out) < 20
    counted = [int(note.split("leaves out ")[1].split()[0]) for note in limit.notes]
    assert len(counted) == 2 and sum(counted) == 10 and "up to 7 tokens" in limit.notes[0]
    again = build_sources([task], "train", 0, PromptLimit(6, True, _characters))
    assert again.problems(0, 80) == train.problems(0, 80)
    with pytest.raises(ConfigError, match=r"p\.jsonl: each of \d+ prompts is longer than rollout.max_prompt_tokens, 2"):
        build_sources([task], "train", 0, PromptLimit(2, True, _characters))


def test_generated_prompts_over_the_limit_are_drawn_again() -> None:
    task = TaskConfig(name="chain_sum", params={"sizes": {"min": 2, "max": 6, "tail": 0}})
    limit = PromptLimit(10, True, _characters)
    mixture = build_sources([task], "train", 0, limit)
    problems = mixture.problems(0, 100)
    assert all(len(problem.prompt) <= 10 for problem in problems)
    (source,) = mixture.sources
    assert isinstance(source, GeneratedSource) and source.left_out > 20
    plain = build_sources([task], "train", 0, PromptLimit(10, False, _characters)).problems(0, 100)
    assert {p.prompt for p in plain if len(p.prompt) <= 10} <= {p.prompt for p in problems}
    with pytest.raises(ConfigError, match=r"within rollout\.max_prompt_tokens; widen"):
        build_sources([task], "train", 0, PromptLimit(3, True, _characters)).problem(0)


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    task = _file(tmp_path / "p.jsonl", [f"q{i}" for i in range(20)])
    assert len(build_sources([task], "train", 0).distinct(30)) > 10
    _file(tmp_path / "p.jsonl", [f"other{i}" for i in range(20)])
    assert all(problem.prompt.startswith("other") for problem in build_sources([task], "train", 0).problems(0, 20))


def test_what_is_wrong_with_several_tasks_is_said_at_once(tmp_path: Path) -> None:
    absent = TaskConfig(kind="file", name="f", path=tmp_path / "f.jsonl")
    with pytest.raises(ConfigError) as caught:
        build_sources([TaskConfig(name="chain_summ"), TaskConfig(name="gcd", params={"x": 1}), absent], "train", 0)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["tasks[0].name", "tasks[1].params.x", "tasks[2].path"]


def _counting(**fields: Any) -> TaskConfig:
    small = {"filters": [1], "transforms": [0, 1], "numbers": {"min": 3, "max": 3, "tail": 0.0}, "max_value": 9}
    return TaskConfig.model_validate({"kind": "procedural", "name": "pipeline_counting", "params": small, **fields})


def _shared(trained: TaskConfig, tested: TaskConfig) -> int:
    """How many of 100 test problems are among 1500 to train on."""
    train = {identity_of(problem) for problem in build_sources([trained], "train", 0).problems(0, 1500)}
    return sum(identity_of(problem) in train for problem in evaluation_problems([tested], 100, 0))


@pytest.mark.parametrize(
    ("trained", "tested", "refused"),
    [
        ({"held_out": "structure", "held_out_fraction": 0.3}, {}, "held_out: found prompt; .*; allowed: structure"),
        (
            {"held_out": "structure"},
            {"held_out": "structure", "held_out_fraction": 0.3},
            r"held_out_fraction: found 0\.3; .*; allowed: at most 0\.1",
        ),
        ({}, {"held_out_fraction": 0.9}, r"held_out_fraction: found 0\.9; .*; allowed: at most 0\.1"),
        ({}, {}, None),
        ({"held_out_fraction": 0.3}, {"held_out_fraction": 0.05}, None),
        (
            {"held_out": "structure", "held_out_fraction": 0.3},
            {"held_out": "structure", "held_out_fraction": 0.1},
            None,
        ),
    ],
)
def test_sets_of_the_evaluation_share_no_problem_with_the_training(
    trained: dict[str, Any], tested: dict[str, Any], refused: str | None
) -> None:
    one, other = _counting(**trained), _counting(**tested)
    sets = [EvaluationSetConfig(name="set", tasks=[TaskConfig(name="gcd"), other])]
    found = split_violations([one], sets)
    if refused is None:
        assert found == [] and _shared(one, other) == 0
    else:
        (line,) = found
        assert re.fullmatch(rf"evaluation\.sets\[0\]\.tasks\[1\]\.{refused}", line) and _shared(one, other) > 0


def test_sets_of_generators_that_are_not_trained_on_are_free(tmp_path: Path) -> None:
    file, other = (_file(tmp_path / name, ["q"]) for name in ("p.jsonl", "q.jsonl"))
    free = [TaskConfig(name="gcd", held_out_fraction=0.5), other.model_copy(update={"held_out_fraction": 0.5})]
    assert split_violations([_counting(), file], [EvaluationSetConfig(name="set", tasks=free)]) == []


@pytest.mark.parametrize("link", ["none", "symbolic", "hard"])
def test_a_file_that_is_trained_on_is_no_set_of_the_evaluation(link: str, tmp_path: Path) -> None:
    file, other = (_file(tmp_path / name, ["p", "q"]) for name in ("p.jsonl", "q.jsonl"))
    assert file.path is not None and other.path is not None
    same = tmp_path / "same.jsonl"
    if link == "symbolic":
        same.symlink_to(file.path)
    elif link == "hard":
        same.hardlink_to(file.path)
    else:
        same = file.path.parent / "." / file.path.name

    def found(tested: TaskConfig, trained: TaskConfig = file) -> list[str]:
        sets = [EvaluationSetConfig(name="set", tasks=[TaskConfig(name="gcd"), tested])]
        return split_violations([_counting(), trained], sets)

    (line,) = found(other.model_copy(update={"path": same}))
    assert line.startswith(
        f"evaluation.sets[0].tasks[1].path: found {same}, the file of tasks[1].path, which is trained on; "
    )
    (line,) = found(other.model_copy(update={"held_out_path": same}))
    assert line.startswith(f"evaluation.sets[0].tasks[1].held_out_path: found {same}, the file of tasks[1].path")
    tested_alone = {"path": same, "held_out_path": other.path}  # the set tests the second file
    assert found(file.model_copy(update=tested_alone)) == []
    assert found(other, file.model_copy(update={"held_out_path": other.path})) == []  # which is not trained on
    held_out = other.model_copy(update={"held_out_path": same})  # of the training itself
    (line,) = split_violations([file, held_out])
    assert line.startswith(f"tasks[1].held_out_path: found {same}, the file of tasks[0].path, which is trained on; ")
    sets = [EvaluationSetConfig(name="set", tasks=[file.model_copy(update={"path": same})])]
    (line,) = split_violations([other], sets, [file.path])
    assert "the file of model.recipe.supervised.data, which is trained on" in line


def test_two_tasks_on_one_file_hold_out_the_same_rows(tmp_path: Path) -> None:
    file = _file(tmp_path / "p.jsonl", [f"q{i}" for i in range(50)])
    held_out = _file(tmp_path / "q.jsonl", ["q1"]).path
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "p.jsonl")
    same = file.model_copy(update={"path": tmp_path / "link.jsonl", "weight": 2.0})
    assert split_violations([file, same]) == []
    (line,) = split_violations([_counting(), file, same.model_copy(update={"held_out_fraction": 0.2})])
    assert line.startswith("tasks[2].held_out_fraction: found 0.2; tasks[1] has 0.1 and the same file ")
    (line,) = split_violations([file, same.model_copy(update={"held_out_path": held_out})])
    assert line.startswith(f"tasks[1].held_out_path: found {held_out}; tasks[0] has None and the same file ")
    both = [each.model_copy(update={"held_out_path": held_out}) for each in (file, same)]
    unused = both[1].model_copy(update={"held_out_fraction": 0.2})
    assert split_violations([both[0], unused]) == []
    with pytest.raises(ConfigError, match="one would train on what the other holds out"):
        build_sources([file, same.model_copy(update={"held_out_fraction": 0.2})], "train", 0)


@pytest.mark.parametrize("with_second_file", [False, True])
def test_a_suffix_does_not_decide_which_rows_of_a_file_are_held_out(with_second_file: bool, tmp_path: Path) -> None:
    plain = _file(tmp_path / "p.jsonl", [f"q{i}" for i in range(50)])
    if with_second_file:
        second = [f"q{i}" for i in range(5)]
        plain = plain.model_copy(update={"held_out_path": _file(tmp_path / "q.jsonl", second).path})
    ends = plain.model_copy(update={"params": {"prompt_suffix": " Think."}})

    def questions(task: TaskConfig, split: Any) -> set[str]:
        return {p.prompt.removesuffix(" Think.") for p in build_sources([task], split, 0).problems(0, 50)}

    for split in ("train", "held_out"):
        assert questions(plain, split) == questions(ends, split)
    assert not questions(plain, "train") & questions(ends, "held_out")
    assert all(p.prompt.endswith(" Think.") for p in build_sources([ends], "train", 0).problems(0, 50))


def test_a_file_of_the_supervised_start_holds_nothing_out(tmp_path: Path) -> None:
    file, other = (_file(tmp_path / name, [f"q{i}" for i in range(50)]) for name in ("p.jsonl", "q.jsonl"))
    assert file.path is not None and other.path is not None
    (tmp_path / "link.jsonl").symlink_to(file.path)
    (line,) = split_violations([_counting(), file], supervised=[other.path, tmp_path / "link.jsonl"])
    assert line.startswith(f"tasks[1].path: found {file.path}, a file of model.recipe.supervised.data, which trains ")
    assert split_violations([file], supervised=[other.path]) == []
    second = file.model_copy(update={"held_out_path": other.path})
    assert split_violations([second], supervised=[file.path]) == []
