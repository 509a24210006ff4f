"""Run a script under torchrun (or alone) with a time limit and a captured log."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

from megatron_tlt.platform.processes import RANK_NAME
from tests.helpers.warm import end_forks, warm_python

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "TLT_TEST_RUN_ID"


@cache
def slowness() -> float:
    """How much slower than an idle machine of the intended kind this one is right now; at least 1, at most 8.

    Time limits are there so that a hang fails with its reason, not so that a busy machine fails. Each worker of pytest
    counts as much again, as it may start processes a moment later.
    """
    began = time.perf_counter()
    total = 0
    for i in range(3_000_000):
        total += i
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return workers * min(8.0, max(1.0, (time.perf_counter() - began) / 0.2))


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_logged(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None, expect_status: int | None = 0
) -> str:
    """Run a command; returns what it printed (both streams). Nothing it started is left behind.

    Raises:
        AssertionError: it ran past ``timeout_s`` or ended with another status than ``expect_status`` (None: any);
            carries the log's end.
    """
    timeout_s *= slowness()
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **(env or {}), MARK: mark}
    # a file, not a pipe: nobody has to read for the processes to go on
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_marked(mark)
            process.wait()
        log.seek(0)
        output = log.read()
    assert status is not None, f"{' '.join(command)}: still running after {timeout_s} s; log:\n{output[-12000:]}"
    assert expect_status is None or status == expect_status, (
        f"{' '.join(command)}: status {status}, expected {expect_status}; log:\n{output[-12000:]}"
    )
    return output


def kill_marked(mark: str) -> None:
    """Kill every process that inherited the mark: torchrun gives its workers sessions of their own."""
    end_forks(mark)
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def _is_worker(process: psutil.Process) -> bool:
    _, _, module = " ".join(process.cmdline()).partition(" -m ")  # torchrun has the worker's behind its own
    return module.startswith("megatron_tlt.cli.workers.")


def worker_of(mark: str, rank: int) -> int:
    """The process id of a rank of the marked launch, or of what stands for it (``tests.helpers.warm``).

    Raises:
        LookupError: there is none.
    """
    for process in psutil.process_iter():
        try:
            environment, parent = process.environ(), process.parent()
            if environment.get(MARK) != mark or parent is None:
                continue
            # a rank's own children have its environment and name, and may have its command line
            name = f"{RANK_NAME}{rank}"
            if process.name() == name != parent.name():
                return process.pid
            if environment.get("RANK") == str(rank) and _is_worker(process) and not _is_worker(parent):
                return process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    raise LookupError(f"no rank {rank}")


def run_torchrun(
    script: Path,
    nproc: int,
    args: Sequence[str] = (),
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    expect_status: int | None = 0,
    fresh: bool = False,
) -> str:
    """Run ``script args`` on ``nproc`` local ranks; returns the log of all of them. Raises as ``run_logged`` does.

    The torchrun is real. Its processes are forks of one that has done the imports; if ``fresh``, they begin with none.
    """
    command = [
        python(fresh),
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={nproc}",
        "--nnodes=1",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
        str(script),
        *args,
    ]
    return run_logged(command, timeout_s, env, expect_status)


def run_python(
    script: Path,
    args: Sequence[str] = (),
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    expect_status: int | None = 0,
    fresh: bool = False,
) -> str:
    """Run ``script args`` in one process; returns its log. Raises as ``run_logged`` does; ``fresh`` as above."""
    return run_logged([python(fresh), str(script), *args], timeout_s, env, expect_status)


def python(fresh: bool = False) -> str:
    """What to start a process with: a Python whose imports are done, or one that has done none."""
    return sys.executable if fresh else warm_python()
