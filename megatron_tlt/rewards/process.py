"""The parent's handle of one verifier process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import megatron_tlt
from megatron_tlt.errors import RunError
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem

#: Time limit of a worker's start. Importing the verifiers' libraries takes 12 s from a cold disk and far longer on a
#: busy machine.
START_LIMIT_S = 300.0

_MODULE = "megatron_tlt.rewards.worker"


class WorkerDied(Exception):
    """The process ended unexpectedly."""


class WorkerProcess:
    """A verifier process, started by the constructor; verifies one response at a time, until ``kill`` or ``close``."""

    def __init__(self, preload: Sequence[str], timeout_s: float) -> None:
        self._buffer = b""
        self._ready = False
        root = str(Path(megatron_tlt.__file__).resolve().parent.parent)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", _MODULE, "--timeout", str(timeout_s), "--preload", *preload]
        # A separate session, so that only the trainer receives Ctrl-C; it closes the pool after saving.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Waits until the libraries are loaded; raises RunError if the process cannot start."""
        if self._ready:
            return
        try:
            self._read(START_LIMIT_S)
        except (WorkerDied, TimeoutError) as error:
            self.kill()
            raise RunError(f"reward worker did not start: {error}; see its own message above") from error
        self._ready = True

    def verify(self, problem: Problem, response: str, limit_s: float) -> Reward:
        """Verifies one response within ``limit_s``.

        Raises:
            TimeoutError: the limit is exceeded; the process must not be used any more.
            WorkerDied: the process has ended.
        """
        self.wait_ready()
        job = json.dumps({"problem": asdict(problem), "response": response}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(job)
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerDied(self._status()) from error
        return Reward(**self._read(limit_s))

    def end(self) -> None:
        """Ends the process at once; safe while another thread waits in ``verify``, which then raises WorkerDied."""
        self._process.kill()

    def kill(self) -> None:
        """Ends the process at once and releases its resources."""
        self.end()
        self.close()

    def close(self) -> None:
        """Ends an idle process by closing its stdin, and waits for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            # wait() uses poll(): select() refuses descriptors above 1,023, which occur with a large engine.
            if left <= 0 or not wait([descriptor], left):
                raise TimeoutError(f"no answer within {limit_s:g} s")
            try:
                chunk = os.read(descriptor, 1 << 16)
            except OSError as error:
                raise WorkerDied(str(error)) from error
            if not chunk:
                raise WorkerDied(self._status())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _status(self) -> str:
        try:
            return f"exit status {self._process.wait(timeout=2.0)}"
        except subprocess.TimeoutExpired:
            return "its pipe closed"
