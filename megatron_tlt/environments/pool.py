"""Keeps episodes in worker processes and gathers their answers while the engine decodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import megatron_tlt
from megatron_tlt.config.task import EnvironmentConfig
from megatron_tlt.errors import RunError
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem

logger = logging.getLogger(__name__)

START_LIMIT_S = 300.0
"""Time limit of a worker's start, as of a verifier's."""
_GRACE_S = 5.0
"""After a worker's own limit, in which it reports a step that took too long."""
_START = -1
"""In place of an episode: the process's own start."""
_MODULE = "megatron_tlt.environments.worker"


@dataclass(frozen=True)
class EnvironmentAnswer:
    """An environment's answer to a turn: the next text, or None at the end; the episode's reward, if it gave one."""

    text: str | None
    reward: Reward | None


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    ready: bool = False
    waiting: dict[int, float] = field(default_factory=dict)
    """Episodes that wait for an answer, and since when (monotonic seconds)."""
    episodes: set[int] = field(default_factory=set)


class EnvironmentPool:
    """Episodes in ``workers`` processes, each on the one with the fewest; a process that dies or hangs is replaced.

    Processes start with the first episode. A step that exceeds ``timeout_s``, an error and the death of a process end
    an episode with a reward of 0 whose ``error`` gives the reason. Methods are called from one thread.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lines: queue.SimpleQueue[tuple[_Worker, bytes | None]] = queue.SimpleQueue()
        self._answers: list[tuple[int, EnvironmentAnswer]] = []
        self._of: dict[int, _Worker] = {}
        self._numbers = itertools.count()
        self._count = workers
        self._workers: list[_Worker] = []

    def start(self, problem: Problem, environment: EnvironmentConfig, seed: int) -> int:
        """Starts an episode and returns its number; a failure is answered as one of its first step."""
        if not self._workers:
            self._workers = [self._launch() for _ in range(self._count)]
        key = next(self._numbers)
        worker = self._of[key] = min(self._workers, key=lambda one: len(one.episodes))
        worker.episodes.add(key)
        job = {"start": asdict(problem), "name": environment.name, "params": environment.params, "seed": seed}
        self._send(worker, key, job)
        return key

    def step(self, key: int, turn: str) -> None:
        """Hands a turn's text to an episode; ``take`` returns the answer."""
        worker = self._of.get(key)
        if worker is None:
            return  # its start failed or its process died: the answer is there already
        worker.waiting[key] = time.monotonic()
        self._send(worker, key, {"step": turn})

    def end(self, key: int) -> None:
        """Forgets an episode."""
        if (worker := self._of.pop(key, None)) is not None:
            worker.episodes.discard(key)
            worker.waiting.pop(key, None)
            self._send(worker, key, {"end": True})

    def take(self, wait_s: float) -> list[tuple[int, EnvironmentAnswer]]:
        """The new answers; waits for one for up to ``wait_s``.

        Raises:
            RunError: a process does not start.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._read(*self._lines.get(timeout=0.0 if self._answers else wait_s))
                wait_s = 0.0
        self._check_limits()
        found, self._answers = self._answers, []
        return found

    def clear(self) -> None:
        """Forgets all episodes."""
        for key in list(self._of):
            self.end(key)
        self._answers.clear()

    def close(self) -> None:
        """Ends the processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            _kill(worker.process)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> _Worker:
        root = str(Path(megatron_tlt.__file__).resolve().parent.parent)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", _MODULE, "--timeout", str(self._timeout_s)]
        # A separate session, so that only the trainer receives Ctrl-C.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        worker = _Worker(process)
        worker.waiting[_START] = time.monotonic()  # until it is ready
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self._lines.put((worker, line))
        self._lines.put((worker, None))

    def _send(self, worker: _Worker, key: int, job: Mapping[str, Any]) -> None:
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):  # it died: the end of its output says so
            worker.process.stdin.write(json.dumps({"key": key, **job}).encode() + b"\n")
            worker.process.stdin.flush()

    def _read(self, worker: _Worker, line: bytes | None) -> None:
        if line is None:
            self._lost(worker, f"the environment's process died: exit status {worker.process.wait()}")
            return
        answer = json.loads(line)
        if "ready" in answer:
            worker.ready = True
            worker.waiting.pop(_START, None)
            now = time.monotonic()  # the time until here was not the environment's
            worker.waiting = dict.fromkeys(worker.waiting, now)
            return
        key = answer["key"]
        if self._of.get(key) is worker:
            worker.waiting.pop(key, None)
            reward = None if answer["reward"] is None else Reward(**answer["reward"])
            self._answer(key, EnvironmentAnswer(answer["text"], reward))

    def _answer(self, key: int, answer: EnvironmentAnswer) -> None:
        if answer.reward is not None and answer.reward.error is not None:
            logger.warning("episode %s: %s", key, answer.reward.error)
            worker = self._of.pop(key)
            worker.episodes.discard(key)
        self._answers.append((key, answer))

    def _lost(self, worker: _Worker, reason: str) -> None:
        """Ends a process's episodes and replaces it."""
        if worker not in self._workers:
            return
        _kill(worker.process)
        if not worker.ready:
            raise RunError(f"environment worker did not start: {reason}; see its own message above")
        self._workers[self._workers.index(worker)] = self._launch()
        for key in sorted(worker.episodes):
            self._answer(key, EnvironmentAnswer(None, Reward(0.0, False, error=reason)))

    def _check_limits(self) -> None:
        for worker in list(self._workers):
            limit_s = self._timeout_s + _GRACE_S if worker.ready else START_LIMIT_S
            if worker.waiting and time.monotonic() - min(worker.waiting.values()) > limit_s:
                self._lost(worker, f"no answer within {limit_s:g} s")


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
