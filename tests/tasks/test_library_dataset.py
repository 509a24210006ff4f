"""Any dataset of reasoning-gym by name, and how a task's prompts are put to the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_tlt.config.migrations import migrate
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.supervised import solution_text
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards.verifiers import VERIFIERS, verifiers_of
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.tasks.sources import Split
from megatron_tlt.tasks.types import Problem

#: Of many kinds: text, grids, code, lists of words, answers that only a scorer knows, slow to make.
NAMES = (
    "basic_arithmetic",
    "countdown",
    "family_relationships",
    "mini_sudoku",
    "rush_hour",
    "word_ladder",
    "zebra_puzzles",
)


def task(name: str = "basic_arithmetic", **options: Any) -> TaskConfig:
    return TaskConfig.model_validate({"kind": "reasoning_gym", "name": name, "answer_format": "answer_tag", **options})


def problems(*tasks: TaskConfig, split: Split = "train", count: int = 8) -> list[Problem]:
    return build_sources(list(tasks), split, 3).problems(0, count)


@pytest.mark.parametrize("name", NAMES)
def test_problems_repeat_and_their_own_answers_get_the_full_score(name: str) -> None:
    first, again = problems(task(name)), problems(task(name))
    assert first == again and len({problem.prompt for problem in first}) > 4
    held_out = {problem.prompt for problem in problems(task(name), split="held_out", count=4)}
    assert not held_out & {problem.prompt for problem in first}
    verify = VERIFIERS["reasoning_gym"]
    for problem in first:
        assert problem.solution is None and problem.prompt.endswith("<answer> and </answer>.")
        sent = Problem(**json.loads(json.dumps(vars(problem))))  # as a verifier's process gets it
        right = verify(sent, f"So it is\n<answer>{problem.answer}</answer>.")
        if problem.answer:
            assert (right.value, right.correct) == (1.0, True)
        assert not verify(sent, f"#### {problem.answer}").correct
        assert not verify(sent, "<answer>no idea</answer>").correct


def test_worked_steps_of_the_library_are_a_solution_that_is_right() -> None:
    """Some of its problems have numbers in them that JSON has not (fractions), or answers written as 30.0 for 30."""
    verify = VERIFIERS["reasoning_gym"]
    for answer_format in ("answer_tag", "boxed", "last_line"):
        given = problems(task("gsm_symbolic", answer_format=answer_format), count=60)
        assert len({len(solution_text(problem)) for problem in given}) > 30
        for problem in given:
            sent = Problem(**json.loads(json.dumps(vars(problem))))
            # the library's scorer takes no negative number, its own answer included
            assert verify(sent, solution_text(problem)).correct or problem.answer.startswith("-"), problem
            assert "####" not in solution_text(problem, careless_fraction=1.0)


def test_parameters_are_the_librarys() -> None:
    (small,) = problems(task(params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}), count=1)
    (large,) = problems(task(params={"min_terms": 9, "max_terms": 9, "min_digits": 4, "max_digits": 4}), count=1)
    assert len(large.prompt) > len(small.prompt) + 20
    assert verifiers_of([task()]) == ["reasoning_gym"]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chain_sums", {}, r"tasks\[0\]\.name: unknown dataset 'chain_sums' of reasoning-gym; did you mean chain_sum"),
        ("chain_sum", {"max_term": 3}, r"tasks\[0\]\.params\.max_term: did you mean max_terms"),
        ("chain_sum", {"seed": 3}, r"tasks\[0\]\.params\.seed: "),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, r"tasks\[0\]\.params: reasoning-gym refuses them for"),
        ("rearc", {}, r"the scorer of 'rearc' gives 0\.05 to the dataset's own answer"),
    ],
)
def test_what_cannot_be_drawn_or_rewarded_is_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_sources([task(name, params=params)], "train", 0)


def test_scores_are_the_librarys_partial_ones_too() -> None:
    (problem,) = problems(task("number_sorting"), count=1)
    almost = str([*json.loads(problem.answer.replace("'", '"')), "1"])
    found = VERIFIERS["reasoning_gym"](problem, f"<answer>{almost}</answer>")
    assert not found.correct and found.value < 1.0


def test_the_scorer_is_that_of_the_tasks_parameters() -> None:
    """``decimal_arithmetic`` rounds to as many places as its config says before it compares."""
    params = {"min_num_decimal_places": 8, "max_num_decimal_places": 10, "precision": 15}
    for problem in problems(task("decimal_arithmetic", params=params), count=12):
        whole, _, places = problem.answer.partition(".")
        if len(places) >= 8:
            eighth = "1" if places[7] != "1" else "7"
            wrong = f"{whole}.{places[:7]}{eighth}{places[8:]}"
            assert VERIFIERS["reasoning_gym"](problem, f"<answer>{problem.answer}</answer>").value == 1.0
            assert VERIFIERS["reasoning_gym"](problem, f"<answer>{wrong}</answer>").value < 1.0
            return
    pytest.fail("no answer has eight places")


@pytest.mark.parametrize(
    ("answer_format", "response", "value"),
    [
        ("answer_tag", "<answer>1</answer> no, <answer> 7 </answer>", 1.0),
        ("answer_tag", "<answer>7", 0.0),
        ("answer_tag", "it is 7", 0.0),
        ("boxed", "it is $\\boxed{7}$.", 1.0),
        ("boxed", "\\boxed{7} or <answer>7</answer> \\boxed{8}", 0.0),
        ("last_line", "3 + 4\nAnswer: **7**\n\n", 1.0),
        ("last_line", "7\nis it", 0.0),
    ],
)
@pytest.mark.parametrize("verifier", ["math", "reasoning_gym"])
def test_the_answer_is_read_where_the_format_asks_for_it(
    verifier: str, answer_format: str, response: str, value: float
) -> None:
    entry = {"question": "3 + 4", "answer": "7", "metadata": {}}
    metadata = {"dataset": "basic_arithmetic", "entry": entry, "answer_in": answer_format}
    problem = Problem("p/1", "p", "3 + 4", "7", verifier, metadata)
    assert VERIFIERS[verifier](problem, response).correct == bool(value)


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def file_task(path: Path, **options: Any) -> TaskConfig:
    return TaskConfig.model_validate(
        {"kind": "file", "name": "mine", "path": path, "held_out_fraction": 1e-9, **options}
    )


def test_files_and_generators_are_put_to_the_model_in_the_same_way(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]
    plain = written(tmp_path / "plain.jsonl", *rows)
    told = {"chat": True, "system_prompt": "Be brief.", "answer_format": "boxed"}
    (problem,) = problems(file_task(plain, **told), count=1)
    system, user = problem.metadata["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["role"] == "user" and user["content"].endswith(
        "+ 1?\n\nThink step by step. Put the final answer into \\boxed{}."
    )
    (own,) = problems(file_task(plain, instruction="Show your work."), count=1)
    assert own.prompt.endswith("+ 1?\n\nShow your work.") and "messages" not in own.metadata
    generated = TaskConfig.model_validate({"name": "gcd", "chat": True})
    (wrapped,) = problems(generated, count=1)
    assert wrapped.metadata["messages"] == [{"role": "user", "content": wrapped.prompt}]
    assert VERIFIERS[wrapped.verifier](wrapped, f"#### {wrapped.answer}").correct


def test_messages_of_a_file_get_system_prompt_and_instruction_but_never_two(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+ 1?"},
    ]
    reward = {"reward_model": {"ground_truth": "3"}}
    path = written(tmp_path / "chat.jsonl", {"prompt": said, **reward})
    (problem,) = problems(file_task(path, system_prompt="Add.", instruction="Only a number."), count=1)
    roles = [message["role"] for message in problem.metadata["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert problem.metadata["messages"][-1]["content"] == "+ 1?\n\nOnly a number."
    path = written(tmp_path / "chat.jsonl", {"prompt": [{"role": "system", "content": "Own."}, *said], **reward})
    with pytest.raises(
        ConfigError, match=r"mine/train/1: it has a system message; allowed: no tasks\[\]\.system_prompt"
    ):
        problems(file_task(path, system_prompt="Add."), count=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "reasoning_gym"}, "needs 'answer_format'"),
        ({"kind": "reasoning_gym", "answer_format": "boxed", "path": "x"}, "takes no 'path'"),
        ({"answer_format": "boxed"}, "has its own answer format"),
        ({"system_prompt": "x"}, "needs 'chat: true'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TaskConfig.model_validate({"name": "gcd", **values})


def test_a_resolved_config_of_an_earlier_release_keeps_its_chat() -> None:
    old = {"tasks": [{"kind": "file", "name": "p", "params": {"chat": True, "prompt_suffix": "!"}}, {"name": "gcd"}]}
    assert migrate(old, "there")["tasks"] == [
        {"kind": "file", "name": "p", "params": {"prompt_suffix": "!"}, "chat": True},
        {"name": "gcd"},
    ]
