"""Starts one process per device through torchrun, passes signals on, and brings back the real exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from megatron_tlt.cli.worker import ERROR_FOLDER, read_first_error
from megatron_tlt.config.schema import LauncherConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.processes import die_with_parent, launch_environment, torchrun_command

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def under_torchrun() -> bool:
    """Whether this process is already one of a launch (torchrun, or torchrun inside srun)."""
    return "RANK" in os.environ and "LOCAL_RANK" in os.environ


def _environment(launcher: LauncherConfig, error_folder: Path) -> dict[str, str]:
    environment = launch_environment(launcher.threads_per_process)
    return {**environment, ERROR_FOLDER: str(error_folder), "PYTHONUNBUFFERED": "1"}


class _Child:
    """torchrun and its workers; each worker has a session of its own, so no signal to a group reaches them all."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.signal: int | None = None

    def _workers(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self._process.pid).children())
        except psutil.NoSuchProcess:
            return []

    def pass_on(self, signum: int, _frame: FrameType | None = None) -> None:
        """The first signal goes to the workers, which save and leave in their own time; the second ends everything.

        torchrun itself is left out of the first: it would kill the workers 30 s later, saved or not.
        """
        workers = self._workers()
        if self.signal is not None or not workers:
            self.signal = self.signal or signum
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            return
        self.signal = signum
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signum)

    def wait(self) -> int:
        return self._process.wait()

    def end_all(self) -> None:
        """Leaves no process behind, whatever the way out."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            family = [root, *root.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)


@contextlib.contextmanager
def _signals_to(child: _Child) -> Iterator[None]:
    before = {signum: signal.signal(signum, child.pass_on) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _status(child: _Child, code: int, error_folder: Path, log: Path | None) -> int:
    error = read_first_error(error_folder)
    if error is not None:
        if error.traceback:
            sys.stderr.write(error.traceback)
        for line in error.message.splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_status
    if child.signal is not None:
        return 128 + child.signal
    if code:
        where = f"; what it wrote is in {log}" if log else ""
        print(f"error: a worker process ended without a word (torchrun's status {code}){where}", file=sys.stderr)
        return 1
    return 0


def launch(
    module: str,
    args: Sequence[str],
    launcher: LauncherConfig,
    *,
    log: Path | None = None,
    extra_env: dict[str, str] | None = None,
) -> int:
    """Runs ``python -m module args...`` in ``launcher.nproc_per_node`` processes and waits for them.

    Args:
        module: a worker's module; its main goes through ``worker.run_worker``.
        args: its arguments.
        launcher: processes and threads.
        log: stderr of torchrun and the workers is appended here; None leaves it on the terminal.
        extra_env: added to the processes' environment.

    Returns:
        0, the failed worker's own exit status, or 128 + signal.

    Raises:
        ConfigError: more than one node, which only torchrun inside srun can start.
    """
    if launcher.nnodes > 1:
        raise ConfigError(
            f"launcher.nnodes: found {launcher.nnodes}; allowed here: 1; torchrun inside srun starts several"
        )
    with contextlib.ExitStack() as stack:
        error_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tlt-launch-")))
        stderr: IO[bytes] | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            stderr = stack.enter_context(log.open("ab"))
            stderr.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {module}\n".encode())
            stderr.flush()
        process = subprocess.Popen(
            torchrun_command(module, args, launcher.nproc_per_node),
            env=_environment(launcher, error_folder) | (extra_env or {}),
            stderr=stderr,
            # Ctrl-C in a terminal reaches a whole group: the workers are to get it once, from here.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        child = _Child(process)
        stack.callback(child.end_all)
        with _signals_to(child):
            code = child.wait()
        return _status(child, code, error_folder, log)
