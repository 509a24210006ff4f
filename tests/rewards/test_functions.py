"""A user's function as a verifier: what it may return, in the real pool, and what is refused before a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards import Reward, RewardPool, verifiers_of
from megatron_tlt.rewards.functions import as_reward
from megatron_tlt.tasks import Problem
from tests.helpers.user_code import add_module

MODULE = "tlt_user_rewards.checks"
SOURCE = """
import asyncio
import os
import time

from megatron_tlt.rewards import Reward

LIMIT = 3


def number(problem, response):
    return float(response == problem.answer)


def judged(problem, text):
    print("this goes to stderr")
    return {"score": len(text) / 10, "correct": text == problem.answer, "extracted": text}


def reward(problem, text):
    return Reward(0.5, True, problem.metadata["hint"])


async def slow(problem, text):
    await asyncio.sleep(0.01)
    return {"value": float(id(asyncio.get_running_loop()))}


class Judge:
    async def __call__(self, problem, text, strict=True):
        return strict


judge = Judge()


async def hangs(problem, text):
    await asyncio.sleep(3600)


def busy(problem, text):
    while True:
        pass


def raises(problem, text):
    raise KeyError(text)


def dies(problem, text):
    os._exit(3)


def text(problem, text):
    return "correct"


def one(problem):
    return 1.0
"""
FUNCTIONS = ["number", "judged", "reward", "slow", "judge", "hangs", "busy", "raises", "dies", "text"]


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_module(tmp_path_factory.mktemp("code"), MODULE, SOURCE, monkeypatch)
        yield


def problem(function: str) -> Problem:
    return Problem("p/1", "p", "3+4", "7", f"{MODULE}.{function}", {"hint": "seven"})


def task(verifier: str, **options: object) -> TaskConfig:
    return TaskConfig.model_validate({"name": "gcd", "verifier": verifier, **options})


def test_functions_judge_in_the_pool_and_their_failures_cost_one_response() -> None:
    verifiers = [f"{MODULE}.{name}" for name in FUNCTIONS]
    with RewardPool(workers=1, timeout_s=3.0, verifiers=verifiers) as pool:
        for name in [*FUNCTIONS, "slow"]:
            pool.submit((name, pool.pending), problem(name), "7")
        rewards = pool.collect()
        counts = pool.counts
    found: dict[str, Reward] = {name: reward for (name, _), reward in rewards.items()}  # type: ignore[misc]
    assert found["number"] == Reward(1.0, True)
    assert found["judged"] == Reward(0.1, True, "7")
    assert found["reward"] == Reward(0.5, True, "seven")
    assert found["judge"] == Reward(1.0, True)
    assert found["slow"].error is None and found["slow"].correct
    for name in ("hangs", "busy"):
        assert found[name] == Reward(0.0, False, error="no answer within 3 s")
    assert found["raises"].error == "KeyError: '7'"
    assert "exit status 3" in (found["dies"].error or "")
    assert found["text"].error == (
        f"TypeError: {MODULE}.text returned 'correct' (str); allowed: a number, a mapping with value (or score) and "
        "optionally correct and extracted, or a Reward"
    )
    assert (counts.verified, counts.timeouts, counts.errors, counts.deaths) == (11, 2, 2, 1)


def test_coroutines_share_one_event_loop() -> None:
    with RewardPool(workers=1, timeout_s=20.0, verifiers=[f"{MODULE}.slow"]) as pool:
        for i in range(3):
            pool.submit(i, problem("slow"), "7")
        assert len({reward.value for reward in pool.collect().values()}) == 1


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (0.25, Reward(0.25, True)),
        (0, Reward(0.0, False)),
        (-1, Reward(-1.0, False)),
        (True, Reward(1.0, True)),
        ({"value": 0.5}, Reward(0.5, True)),
        ({"score": 0.5, "correct": False}, Reward(0.5, False)),
        ({"value": 0, "extracted": "7"}, Reward(0.0, False, "7")),
        (Reward(0.0, False, None, "no server"), Reward(0.0, False, None, "no server")),
    ],
)
def test_what_a_function_may_return(returned: object, expected: Reward) -> None:
    assert as_reward(returned, "f") == expected


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "f returned None (NoneType); allowed: a number, a mapping"),
        ([1.0], "f returned [1.0] (list); allowed: a number"),
        ({"correct": True}, "allowed: one of value and score"),
        ({"value": 1, "score": 1}, "allowed: one of value and score"),
        ({"score": 1, "acc": True}, "allowed: the keys value, score, correct, extracted, not 'acc'"),
        (math.nan, "f returned nan (float); allowed: a finite number as value"),
        ({"value": "1"}, "allowed: a finite number as value"),
        ({"value": 1, "correct": 1}, "allowed: true or false as correct"),
        ({"value": 1, "extracted": 7}, "allowed: text or None as extracted"),
        (Reward(math.inf, True), "allowed: a finite number as value"),
        ("x" * 500, "x... (str); allowed"),
    ],
)
def test_what_it_may_not_return(returned: object, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        as_reward(returned, "f")
    assert said in str(caught.value) and len(str(caught.value)) < 300


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_the_value_and_correct_above_zero(value: float) -> None:
    assert as_reward(value, "f") == as_reward({"score": value}, "f") == Reward(value, value > 0)


def test_tasks_of_every_kind_take_a_function(tmp_path: Path) -> None:
    path = f"{MODULE}.number"
    file = task(path, kind="file", path=tmp_path)
    library = task(path, kind="reasoning_gym", answer_format="boxed")
    assert verifiers_of([file, library, task(path)]) == [path]
    assert verifiers_of([task("math"), task("reasoning_gym")]) == ["math", "reasoning_gym"]


@pytest.mark.parametrize(
    ("verifier", "said"),
    [
        (
            "maths",
            "unknown verifier 'maths'; allowed for kind generated: code, math, reasoning_gym, or a function's import",
        ),
        (".number", "unknown verifier '.number'"),
        (
            "no_such_package.score",
            "found 'no_such_package.score'; 'no_such_package' cannot be imported: ModuleNotFound",
        ),
        (f"{MODULE}.numbr", f"no function 'numbr' in {MODULE}; did you mean number?"),
        (f"{MODULE}.LIMIT", f"found '{MODULE}.LIMIT'; not a function (problem, response_text)"),
        (f"{MODULE}.Judge", "not a function (problem, response_text)"),
        (f"{MODULE}.one", f"found {MODULE}.one(problem); allowed: a function that takes (problem, response_text)"),
        ("tlt_user_broken.score", "'tlt_user_broken' cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_wrong_ones_are_refused_with_their_key(
    verifier: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_module(tmp_path, "tlt_user_broken", "1 / 0\n", monkeypatch)
    with pytest.raises(ConfigError) as caught:
        verifiers_of([task("math"), task(verifier)])
    (line,) = str(caught.value).splitlines()
    assert line.startswith("tasks[1].verifier: ") and said in line
    with pytest.raises(ConfigError):
        RewardPool(workers=1, timeout_s=1.0, verifiers=[verifier])
