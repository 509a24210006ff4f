"""Episodes in processes: answers, errors, time limits and deaths, each of which ends an episode and nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from megatron_tlt.config.task import EnvironmentConfig
from megatron_tlt.environments.interface import Observation
from megatron_tlt.environments.pool import EnvironmentAnswer, EnvironmentPool
from megatron_tlt.tasks.types import Problem

PROBLEM = Problem("p/1", "p", "?", "5", "math")
HERE = "tests.environments.test_pool."


class Echo:
    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s, self._turns = delay_s, 0

    async def reset(self, problem: Problem, seed: int) -> None:
        self._seed = seed

    async def step(self, turn: str) -> Observation:
        await asyncio.sleep(self._delay_s)
        self._turns += 1
        if turn == "end":
            return Observation(None, {"value": self._turns / 10, "correct": True})
        return Observation(f"{self._seed}: {turn}")


class Bad:
    def __init__(self, how: str) -> None:
        self._how = how

    def reset(self, problem: Problem, seed: int) -> None:
        if self._how == "reset":
            raise ValueError("no start")

    def step(self, turn: str) -> Observation:
        if self._how == "raise":
            raise ValueError("no step")
        if self._how == "sleep":
            time.sleep(60)
        if self._how == "die":
            os._exit(3)
        return "no observation"  # type: ignore[return-value]


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(2, 1.5) as made:
        yield made


def echo(delay_s: float = 0.0) -> EnvironmentConfig:
    return EnvironmentConfig(name=f"{HERE}Echo", params={"delay_s": delay_s})


def take(pool: EnvironmentPool, count: int) -> dict[int, EnvironmentAnswer]:
    found: dict[int, EnvironmentAnswer] = {}
    deadline = time.monotonic() + 120.0
    while len(found) < count and time.monotonic() < deadline:
        found.update(pool.take(0.5))
    return found


def test_episodes_are_answered_beside_each_other(pool: EnvironmentPool) -> None:
    numbers = [pool.start(PROBLEM, echo(1.0), seed) for seed in range(40)]
    for number in numbers:
        pool.step(number, "hello")
    first = take(pool, 1)
    began = time.monotonic()
    found = {**first, **take(pool, 40 - len(first))}
    assert time.monotonic() - began < 20.0, "40 waits of a second"
    assert {number: found[number].text for number in numbers} == {n: f"{i}: hello" for i, n in enumerate(numbers)}
    for number in numbers:
        pool.step(number, "end")
    ended = take(pool, 40)
    assert all(answer.text is None and answer.reward is not None for answer in ended.values())
    assert {answer.reward.value for answer in ended.values() if answer.reward} == {0.2}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("reset", "ValueError: no start"),
        ("raise", "ValueError: no step"),
        ("sleep", "no answer within 1.5 s"),
        ("wrong", "TypeError: step returned 'no observation'"),
        ("die", "the environment's process died: exit status 3"),
    ],
)
def test_what_fails_ends_its_episode_with_the_reason(how: str, reason: str, pool: EnvironmentPool) -> None:
    good = pool.start(PROBLEM, echo(), 1)
    pool.step(good, "hello")
    assert take(pool, 1)[good].text == "1: hello"
    bad = pool.start(PROBLEM, EnvironmentConfig(name=f"{HERE}Bad", params={"how": how}), 1)
    pool.step(bad, "hello")
    answer = take(pool, 1)[bad]
    assert answer.text is None and answer.reward is not None
    assert answer.reward.value == 0.0 and answer.reward.error is not None and answer.reward.error.startswith(reason)
    pool.step(bad, "again")  # it has been answered
    later = pool.start(PROBLEM, echo(), 2)
    pool.step(later, "hello")
    pool.step(good, "end")
    found = take(pool, 2)
    assert found.keys() == {later, good} and found[later].text == "2: hello"


def test_a_forgotten_episode_is_not_answered(pool: EnvironmentPool) -> None:
    slow, other = pool.start(PROBLEM, echo(0.8), 1), pool.start(PROBLEM, echo(1.0), 2)
    pool.step(slow, "hello")
    pool.step(other, "hello")
    pool.end(slow)
    assert take(pool, 1).keys() == {other}
    pool.clear()
    assert pool.take(0.2) == []
