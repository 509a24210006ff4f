"""The process that holds episodes: reads JSON lines from stdin, writes JSON lines to stdout, ends when stdin ends.

A separate program for the reason that the verifiers' is one (``rewards/worker.py``). Episodes are answered beside each
other: coroutines in one event loop, other methods in threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from megatron_tlt.environments.interface import Observation
from megatron_tlt.environments.registry import load_environment
from megatron_tlt.rewards.functions import as_reward
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem

_THREADS = 64
_MOST_STUCK = 32
"""Threads that may hang beyond their time limit before this process gives up and is replaced."""


class EpisodeServer:
    """Answers jobs in the order of each episode; see :class:`~megatron_tlt.environments.pool.EnvironmentPool`."""

    def __init__(self, write: Callable[[dict[str, Any]], None], timeout_s: float) -> None:
        self._write, self._timeout_s = write, timeout_s
        self._episodes: dict[int, Any] = {}
        self._last: dict[int, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_THREADS)
        self._stuck = 0

    def accept(self, job: dict[str, Any]) -> None:
        """Starts a job after its episode's earlier ones."""
        key, before = job["key"], self._last.get(job["key"])
        task = self._last[key] = asyncio.get_running_loop().create_task(self._run(job, before))
        task.add_done_callback(lambda done: self._last.pop(key) if self._last.get(key) is done else None)

    async def _run(self, job: dict[str, Any], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        key, error, observation = job["key"], None, Observation(None)
        try:
            if "end" in job:
                await self._close(key)
                return
            if "start" in job:
                self._episodes[key] = load_environment(job["name"], job["params"], "environment")()
                await self._call(self._episodes[key].reset, Problem(**job["start"]), job["seed"])
                return
            if key not in self._episodes:
                return  # its start failed, which has been answered
            observation = await self._call(self._episodes[key].step, job["step"])
            if not isinstance(observation, Observation) or not isinstance(observation.text, str | None):
                raise TypeError(f"step returned {str(observation)[:80]!r}; allowed: Observation(text or None, reward)")
            reward = None if observation.reward is None else as_reward(observation.reward, "the environment")
        except TimeoutError:
            error, reward = f"no answer within {self._timeout_s:g} s", None
        except Exception as found:  # of a user's class
            error, reward = f"{type(found).__name__}: {found}"[:500], None
        if error is not None:
            self._episodes.pop(key, None)
            self._write({"key": key, "text": None, "reward": asdict(Reward(0.0, False, error=error))})
        else:
            self._write({"key": key, "text": observation.text, "reward": None if reward is None else asdict(reward)})

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await asyncio.wait_for(method(*arguments), self._timeout_s)
        running = asyncio.get_running_loop().run_in_executor(self._threads, method, *arguments)
        try:
            found = await asyncio.wait_for(asyncio.shield(running), self._timeout_s)
        except TimeoutError:
            self._stuck += not running.done()
            if self._stuck > _MOST_STUCK:
                os._exit(1)  # the pool reports the episodes and starts another process
            raise
        return await asyncio.wait_for(found, self._timeout_s) if inspect.isawaitable(found) else found

    async def _close(self, key: int) -> None:
        close = getattr(self._episodes.pop(key, None), "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                await self._call(close)


async def serve(timeout_s: float) -> None:
    """Answers jobs until stdin ends.

    Jobs are ``{"key", "start": problem, "name", "params", "seed"}``, ``{"key", "step": turn}`` and ``{"key", "end":
    true}``. Each step is answered by ``{"key", "text", "reward"}``, and so is a start that fails.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the answers

    def write(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    server = EpisodeServer(write, timeout_s)
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    write({"ready": True})
    while line := await reader.readline():
        server.accept(json.loads(line))
    os._exit(0)  # threads that hang do not delay it


def main() -> None:
    """``python -m megatron_tlt.environments.worker --timeout S``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, required=True)
    asyncio.run(serve(parser.parse_args().timeout))


if __name__ == "__main__":
    main()
