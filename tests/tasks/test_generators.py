"""Every generator: the library accepts its worked solutions, rejects others, and problems depend on the key alone."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards import VERIFIERS
from megatron_tlt.tasks import GENERATORS, build_sources
from megatron_tlt.tasks.marker import ANSWER_MARKER

NAMES = sorted(GENERATORS)


def _task(name: str, **params: object) -> TaskConfig:
    return TaskConfig(name=name, params=dict(params))


@pytest.mark.parametrize("name", NAMES)
def test_worked_solutions_satisfy_the_library(name: str) -> None:
    for problem in build_sources([_task(name)], "train", seed=3).problems(0, 150):
        assert problem.solution is not None
        reward = VERIFIERS[problem.verifier](problem, problem.solution)
        assert (reward.value, reward.correct, reward.error) == (1.0, True, None), (problem.prompt, problem.solution)
        assert reward.extracted == problem.answer


@pytest.mark.parametrize("name", NAMES)
def test_other_answers_do_not(name: str) -> None:
    problems = build_sources([_task(name)], "train", seed=3).problems(0, 60)
    for problem, other in pairwise(problems):
        assert problem.solution is not None and other.solution is not None
        assert VERIFIERS[problem.verifier](problem, other.solution).correct == (problem.answer == other.answer)
        unmarked = problem.solution.replace(ANSWER_MARKER, "")
        assert VERIFIERS[problem.verifier](problem, unmarked).value == 0.0
        assert VERIFIERS[problem.verifier](problem, problem.solution + "9").value == 0.0
        assert VERIFIERS[problem.verifier](problem, "").extracted is None


def test_sorting_is_judged_exactly_where_the_library_is_tolerant() -> None:
    for problem in build_sources([_task("number_sorting")], "train", seed=0).problems(0, 50):
        numbers = [int(n) for n in problem.answer.split()]
        numbers[0 if numbers[0] < numbers[-1] else -1] -= 1
        answer = f"{ANSWER_MARKER} {' '.join(map(str, numbers))}"
        assert not VERIFIERS["reasoning_gym"](problem, answer).correct


@pytest.mark.parametrize(
    ("name", "prompt", "solution"),
    [
        ("chain_sum", "sum 3+5-2\n", "8-2\n6\n#### 6"),
        ("spell_backward", "reverse sun\n", "su|n\ns|nu\n#### nus"),
        ("number_sorting", "sort down 7 13 9\n", "13|7 9\n9|7\n7|\n#### 13 9 7"),
        ("letter_counting", "count e: the tree\n", "t0h0e1 t1r1e2e3\n#### 3"),
        ("gcd", "gcd 48 18\n", "30 18\n12 18\n12 6\n6 6\n#### 6"),
    ],
)
def test_steps_are_written_out(name: str, prompt: str, solution: str) -> None:
    entries = {
        "chain_sum": {"answer": "6", "metadata": {"expression": "3 + 5 - 2"}},
        "spell_backward": {"answer": "nuS", "metadata": {"word": "Sun"}},
        "number_sorting": {"metadata": {"original_numbers": ["7.0", "13.0", "9.0"], "direction": "descending"}},
        "letter_counting": {"answer": "3", "metadata": {"span": ["The", "tree"], "target_letter": "e"}},
        "gcd": {"answer": "6", "metadata": {"numbers": [48, 18]}},
    }
    kind = GENERATORS[name]
    worked = kind(kind.params_type()).write(entries[name])
    assert (worked.prompt, worked.solution) == (prompt, solution)


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "number_sorting", "gcd"])
def test_solutions_have_a_long_tail(name: str) -> None:
    problems = build_sources([_task(name)], "train", seed=1).problems(0, 1000)
    lengths = sorted(len(problem.solution or "") for problem in problems)
    assert lengths[-1] >= 5 * lengths[len(lengths) // 2]


@pytest.mark.parametrize("name", ["chain_sum", "number_sorting", "letter_counting", "spell_backward"])
def test_length_grows_with_size(name: str) -> None:
    means = []
    for size in (3, 6, 10):
        task = _task(name, sizes={"min": size, "max": size})
        problems = build_sources([task], "train", seed=1).problems(0, 40)
        means.append(sum(len(problem.solution or "") for problem in problems) / 40)
    assert means[0] < means[1] < means[2]
    assert means[2] > 2.5 * means[0]


def test_problems_are_the_same_in_another_process() -> None:
    code = (
        "from megatron_tlt.config.schema import TaskConfig\n"
        "from megatron_tlt.tasks import GENERATORS, build_sources\n"
        "m = build_sources([TaskConfig(name=n) for n in sorted(GENERATORS)], 'train', 5)\n"
        "print([m.problem(i) for i in (40, 3, 1001)])\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    mixture = build_sources([TaskConfig(name=name) for name in NAMES], "train", 5)
    forward = {index: mixture.problem(index) for index in (3, 40, 1001)}
    assert printed.strip() == str([forward[40], forward[3], forward[1001]])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (_task("chain_sums"), r"tasks\[0\]\.name: unknown generator 'chain_sums'; allowed are chain_sum, gcd"),
        (_task("chain_sum", size=3), r"tasks\[0\]\.params\.size: .*; allowed are sizes, max_digits"),
        (_task("chain_sum", sizes={"min": 5, "max": 2}), r"tasks\[0\]\.params\.sizes: .*max is 2.*at least min, 5"),
        (
            _task("chain_sum", sizes={"min": 0, "max": 2}),
            r"tasks\[0\]\.params\.sizes\.min: .*greater than or equal to 1",
        ),
        (_task("spell_backward", sizes={"min": 3, "max": 11}), r"3 to 10 letters"),
        (_task("gcd", sizes={"min": 1, "max": 9}), r"at least 2"),
    ],
)
def test_wrong_params_are_named(task: TaskConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_sources([task], "train", seed=0)


def test_all_wrong_params_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_sources([_task("chain_sum", max_digits=0, wrong=1)], "train", seed=0)
    assert "tasks[0].params.max_digits" in str(caught.value) and "tasks[0].params.wrong" in str(caught.value)
