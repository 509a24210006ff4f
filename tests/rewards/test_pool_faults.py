"""What ends a pool's serving thread, or its worker's pipe, is an error within a bounded time, never a wait for ever."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_tlt.errors import RunError
from megatron_tlt.rewards import Reward, RewardPool, process
from megatron_tlt.tasks import Problem
from tests.helpers.limits import open_files_limit

#: Far above what a verdict takes here, far below for ever.
PATIENCE_S = 60.0


def _math(answer: str) -> Problem:
    return Problem(uid="p", source="s", prompt="?", answer=answer, verifier="math")


def _collect(pool: RewardPool) -> Mapping[Any, Reward]:
    """``pool.collect()`` in a thread of its own, so that a hang fails the test; raises what it raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(pool.collect())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), f"collect still waits after {PATIENCE_S:g} s"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@contextmanager
def _warm_pool(timeout_s: float = 10.0) -> Iterator[RewardPool]:
    with RewardPool(workers=1, timeout_s=timeout_s, verifiers=["math"]) as pool:
        pool.submit("warm", _math("1"), "#### 1")
        assert _collect(pool)["warm"].correct
        yield pool


def test_descriptors_above_1023_are_served() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("the hard limit of open files is below 2,048")
    with open_files_limit(2048):
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        try:
            with _warm_pool() as pool:
                worker = pool._active[0]
                assert worker._process.stdout is not None and worker._process.stdout.fileno() > 1023
                os.kill(worker.pid, signal.SIGKILL)  # its replacement stands above 1,023 too
                pool.submit("dead", _math("2"), "#### 2")
                pool.submit("served", _math("2"), "#### 2")
                rewards = _collect(pool)
                assert rewards["dead"].error is not None and rewards["served"].correct
        finally:
            for descriptor in held:
                os.close(descriptor)


def test_a_pipe_that_breaks_costs_one_verdict() -> None:
    with _warm_pool() as pool:
        stdout = pool._active[0]._process.stdout
        assert stdout is not None
        os.close(stdout.fileno())
        pool.submit("lost", _math("2"), "#### 2")
        pool.submit("next", _math("2"), "#### 2")
        rewards = _collect(pool)
        assert rewards["next"].correct
        assert not rewards["lost"].correct and "Bad file descriptor" in (rewards["lost"].error or "")
        assert pool.counts.deaths == 1


def test_a_worker_that_cannot_be_replaced_is_an_error_of_collect_and_submit() -> None:
    with _warm_pool() as pool:
        os.kill(pool._active[0].pid, signal.SIGKILL)
        with open_files_limit(3):
            pool.submit("dead", _math("2"), "#### 2")
            with pytest.raises(RunError, match=r"reward pool: .*Too many open files"):
                _collect(pool)
        with pytest.raises(RunError, match="Too many open files"):
            pool.submit("later", _math("2"), "#### 2")
        with pytest.raises(RunError, match="Too many open files"):
            _collect(pool)


def test_a_serving_thread_that_is_gone_is_an_error() -> None:
    with _warm_pool() as pool:
        pool._jobs.put(None)  # what ends a thread when the pool closes
        pool._threads[0].join(PATIENCE_S)
        pool.submit("nobody", _math("2"), "#### 2")
        with pytest.raises(RunError, match="1 response without a verdict, and all its threads"):
            _collect(pool)


def test_a_worker_that_does_not_take_its_job_is_an_error_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with _warm_pool(timeout_s=1.0) as pool:
        monkeypatch.setattr(process, "START_LIMIT_S", 1.0)
        os.kill(pool._active[0].pid, signal.SIGSTOP)
        pool.submit("stuck", _math("2"), "#### " + "2" * (1 << 20))  # more than a pipe holds
        began = time.monotonic()
        with pytest.raises(RunError, match=r"no verdict for \d+ s.*1 response outstanding"):
            _collect(pool)
        assert time.monotonic() - began >= 2.0
