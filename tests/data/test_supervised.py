"""Worked solutions as supervised examples: what is trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.supervised import (
    CARELESS_MARK,
    SLIP_RATE,
    encode_example,
    fitting_examples,
    solution_text,
)
from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards.extract import formatted_answer
from megatron_tlt.tasks import GENERATORS, Problem, build_sources
from megatron_tlt.tasks.wording import ANSWER_IN


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([], 128, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return build_sources([TaskConfig(name=name) for name in sorted(GENERATORS)], "train", 0).problems(0, 100)


def test_solution_and_end_are_trained_and_nothing_else(tokenizer: Tokenizer, problems: list[Problem]) -> None:
    for problem in problems:
        example = encode_example(tokenizer, problem)
        trained = [i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m]
        rest = [i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if not m]
        assert tokenizer.decode(rest) == problem.prompt
        assert tokenizer.decode(trained[:-1]) == problem.solution and trained[-1] == tokenizer.eos_id
        assert sum(example.loss_mask[: len(rest)]) == 0


def test_careless_solutions_are_marked_guesses(problems: list[Problem]) -> None:
    texts = {fraction: [solution_text(problem, fraction) for problem in problems] for fraction in (0.0, 0.5, 1.0)}
    assert texts[0.0] == [problem.solution for problem in problems]
    marked = {fraction: sum(text.startswith(CARELESS_MARK) for text in rows) for fraction, rows in texts.items()}
    assert 0 < marked[0.5] < marked[1.0] == len(problems)
    changed = total = 0
    for problem, text in zip(problems, texts[1.0], strict=True):
        guess = text.removeprefix(f"{CARELESS_MARK}#### ")
        assert len(guess) == len(problem.answer) and "\n" not in guess
        changed += sum(x != y for x, y in zip(problem.answer, guess, strict=True))
        total += len(guess)
    assert SLIP_RATE / 2 < changed / total < SLIP_RATE  # a slip may hit upon the right character


@pytest.mark.parametrize(
    ("answer_format", "end"), [("answer_tag", "<answer>%s</answer>"), ("boxed", "\\boxed{%s}"), ("last_line", "%s")]
)
def test_the_answer_is_where_the_task_asks_for_it(answer_format: str, end: str, problems: list[Problem]) -> None:
    for problem in problems[:20]:
        asked = replace(problem, metadata={**problem.metadata, ANSWER_IN: answer_format})
        assert problem.solution is not None
        steps = problem.solution.removesuffix(f"#### {problem.answer}")
        assert solution_text(asked) == steps + end % problem.answer
        careless = solution_text(asked, 1.0)
        assert careless.startswith(CARELESS_MARK) and "#" not in careless
        assert len(formatted_answer(careless, answer_format) or "") <= len(problem.answer), "the mark is no part of it"
    two_lines = replace(problems[0], solution="so\n#### 1 2\n3 4", metadata={ANSWER_IN: answer_format})
    assert solution_text(two_lines) == "so\n" + end % "1 2\n3 4"


def test_long_examples_are_left_out_whole(tokenizer: Tokenizer, problems: list[Problem]) -> None:
    lengths = [len(encode_example(tokenizer, problem)) for problem in problems]
    kept = fitting_examples([encode_example(tokenizer, problem) for problem in problems], 60)
    assert [len(example) for example in kept] == [length for length in lengths if length <= 60]
    assert 0 < len(kept) < len(problems)


def test_a_problem_without_a_solution_is_refused(tokenizer: Tokenizer, problems: list[Problem]) -> None:
    with pytest.raises(ConfigError, match=f"problem {problems[0].uid}: no worked solution"):
        encode_example(tokenizer, replace(problems[0], solution=None))


def test_a_length_that_no_example_has_is_refused(tokenizer: Tokenizer, problems: list[Problem]) -> None:
    examples = [encode_example(tokenizer, problem) for problem in problems]
    shortest = min(map(len, examples))
    assert len(fitting_examples(examples, shortest)) >= 1
    with pytest.raises(ConfigError, match=rf"max_sequence_tokens: found {shortest - 1}; .* at least {shortest}, so"):
        fitting_examples(examples, shortest - 1)
