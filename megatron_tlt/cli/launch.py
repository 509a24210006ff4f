"""Starts one process per device through torchrun, forwards signals, and returns the real exit status."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

import psutil

from megatron_tlt.cli.restarts import EndedStart, Progress, Restarts
from megatron_tlt.cli.torchruns import Torchruns
from megatron_tlt.cli.worker import ERROR_FOLDER, NOTHING_SAVED, has_reported, read_first_error
from megatron_tlt.config.schema import LauncherConfig
from megatron_tlt.platform.deaths import FAILURES, first_death, read_failures
from megatron_tlt.platform.membership import RoundEnd
from megatron_tlt.platform.memory_folder import SNAPSHOTS
from megatron_tlt.platform.nodes import Nodes
from megatron_tlt.platform.processes import END_TORCHRUN, FORK_NAME, PRELOADING_NAME, kill_with_children


@dataclass(frozen=True)
class LaunchStart:
    """What one start of a launch's processes on this node needs.

    Attributes:
        args: the worker's arguments.
        launcher: processes and threads.
        nodes: this node among those that take part; None without others.
        number: of this start, the same on all nodes; each start has its own rendezvous port.
        environment: variables for the processes, in addition to those of every launch.
        restarts: of the launch so far, where its launchers have agreed on them; else None.
        failed_after: with it, steps that were done when the same nodes lost ranks in the start before.
    """

    args: Sequence[str]
    launcher: LauncherConfig
    nodes: Nodes | None
    number: int
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int | None = None
    failed_after: int | None = None


class LaunchNodes(Protocol):
    """Decides before each start which nodes take part in it."""

    def next(self, stopped: Callable[[], bool], end: RoundEnd) -> LaunchStart | None:
        """The next start; None if this node has no part in the rest of the launch, or was told to stop.

        ``end``: of the start before.
        """

    def give_up(self) -> None:
        """Ends the launch for all nodes: ``launcher.max_restarts`` or a step that failed twice says so."""

    def is_obsolete(self) -> bool:
        """Whether other nodes have left the newest start for the next one."""


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_launches = itertools.count()
_MEETING_ENDS_S = 20
_OBSOLETE_ENDS_S = 10
_PROGRESS_S = 5.0
_ASKED_AGAIN_S = 60  # longer than torchrun gives its workers


def under_torchrun() -> bool:
    """Whether this process belongs to a launch (torchrun, or torchrun inside srun)."""
    return "RANK" in os.environ and "LOCAL_RANK" in os.environ


class _Child:
    """torchrun and its workers; each worker has its own session, so no signal to a group reaches all of them.

    A scheduler that started this process may send SIGTERM twice, and ends late processes itself.
    """

    def __init__(self, scheduled: bool) -> None:
        self._scheduled = scheduled
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_s: float | None = None  # when torchrun was last asked to end
        self.signal: int | None = None

    def run(
        self,
        process: subprocess.Popen[bytes],
        failed: Callable[[], bool],
        obsolete: Callable[[], bool],
        meanwhile: Callable[[], None],
    ) -> int:
        """Waits for a torchrun that was just started, and returns its status.

        Calls ``meanwhile`` each second until a stop is requested.

        If it ``failed`` and has no workers left, it may search for the first node for minutes: then this does not wait.
        If it is ``obsolete``, it is ended after some seconds, in which its workers may notice why themselves.
        """
        self._process = process
        if self.signal is not None:  # the signal came before the process was started
            self._end_torchrun()
        left, current = _MEETING_ENDS_S, _OBSOLETE_ENDS_S
        while left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(1)
            if self.signal is None:
                meanwhile()
            if self._asked_s is not None and time.monotonic() - self._asked_s > _ASKED_AGAIN_S:
                self._end_torchrun()  # an interpreter can lose a signal while it starts
            left = left - 1 if not self._workers() and failed() else _MEETING_ENDS_S
            current = current - 1 if obsolete() else _OBSOLETE_ENDS_S
            if not current:
                kill_with_children(process.pid)
        process.kill()
        process.wait()
        return 1

    def _workers(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            torchrun = psutil.Process(self._process.pid)
            if torchrun.name() == PRELOADING_NAME:
                return found  # its children are those of an import
            for worker in torchrun.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    # torchrun may reap it late; a fork that waits is no rank yet
                    if worker.status() != psutil.STATUS_ZOMBIE and worker.name() not in (FORK_NAME, PRELOADING_NAME):
                        found.append(worker)
        return found

    def pass_on(self, signum: int, _frame: FrameType | None = None) -> None:
        """Forwards the first signal to the workers, which save and exit themselves; the second signal ends everything.

        torchrun does not receive the first one: it would kill the workers after 30 s, even if they have not saved.
        """
        workers = self._workers()
        if self._scheduled and signum == self.signal == signal.SIGTERM and workers:
            return
        if self.signal is not None or not workers:
            self.signal = self.signal or signum
            self._end_torchrun()
            return
        self.signal = signum
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signum)

    def _end_torchrun(self) -> None:
        if self._process is not None:
            self._asked_s = time.monotonic()
            self._process.send_signal(END_TORCHRUN)

    def end_all(self) -> None:
        """Ends all remaining processes, on every exit path."""
        if self._process is not None:
            kill_with_children(self._process.pid)


def _needs_log(child: _Child, ended: EndedStart) -> bool:
    """Whether the message of :func:`_status` refers to the log."""
    return ended.death is not None or (ended.error is None and ended.code != 0 and child.signal is None)


def _status(child: _Child, ended: EndedStart, log: Path | None, nodes: Nodes | None) -> int:
    where = f"; its output is in {log}" if log else ""
    error = ended.error
    said = error is not None and error.message != NOTHING_SAVED.format("SIGINT")
    if child.signal is not None and ended.death is None and not said:
        print(f"error: {NOTHING_SAVED.format(signal.Signals(child.signal).name)}", file=sys.stderr)
        return 128 + child.signal
    died = ended.death is not None and (error is None or error.exit_status == 1)
    if died:
        print(f"error: {ended.death}{where}", file=sys.stderr)
    if error is not None and not (died and error.traceback):  # the other ranks only report the missing one
        if error.traceback:
            sys.stderr.write(error.traceback)
        for line in error.message.splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_status
    if died:
        return 1
    if child.signal is not None:
        return 128 + child.signal
    if ended.code:
        why = f", or the nodes did not meet or lost contact at {nodes.host}:{nodes.port}" if nodes else ""
        what = f"a worker process ended without an error message{why} (torchrun's status {ended.code}){where}"
        print(f"error: {what}", file=sys.stderr)
        return 1
    return 0


def _run_once(
    child: _Child,
    torchruns: Torchruns,
    start: LaunchStart,
    memory: Path | None,
    obsolete: Callable[[], bool],
    meanwhile: Callable[[], None],
) -> EndedStart:
    with tempfile.TemporaryDirectory(prefix="tlt-launch-") as folder:
        failures = Path(folder, "failures.json")
        told = {ERROR_FOLDER: folder, FAILURES: str(failures), "PYTHONUNBUFFERED": "1", **start.environment}
        if memory is not None:
            told[SNAPSHOTS] = str(memory)
        process = torchruns.start(start.args, start.launcher, start.nodes, start.number, told)
        code = child.run(process, lambda: read_first_error(Path(folder)) is not None, obsolete, meanwhile)
        death = first_death(read_failures(failures), code)
        if death is not None and death.rank is not None and has_reported(Path(folder), death.rank):
            death = None  # it was killed while it left with its error, such as by torch, whose other ranks had gone
        return EndedStart(code, death, read_first_error(Path(folder)), code != 0 and obsolete())


class _Reserve:
    """Has the next start of a launch prepared, once in each start, when a step is done.

    Earlier it would take the time of the ranks that start.
    """

    def __init__(self, torchruns: Torchruns, launcher: LauncherConfig, progress: Progress) -> None:
        self._torchruns, self._launcher, self._progress = torchruns, launcher, progress
        self._least: int | None = None
        self._next_look = 0.0
        self._done = not torchruns.preloads

    def look(self) -> None:
        """Called each second."""
        if self._done or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _PROGRESS_S
        steps, _ = self._progress()
        self._least = steps if self._least is None else min(steps, self._least)  # a resumed run drops rows
        if steps > self._least:
            self._done = True
            try:
                self._torchruns.prepare(self._launcher)
            except OSError as error:
                print(f"warning: the next start is not prepared: {error}", file=sys.stderr, flush=True)


def launch(
    module: str,
    args: Sequence[str],
    launcher: LauncherConfig,
    *,
    log: Path | None = None,
    keep_log: bool = True,
    progress: Progress | None = None,
    memory: Path | None = None,
    elastic: LaunchNodes | None = None,
    preload: Sequence[str] = (),
) -> int:
    """Runs ``python -m module args...`` in ``launcher.nproc_per_node`` processes and waits for them.

    Args:
        module: a worker's module; its main uses ``worker.run_worker``.
        args: its arguments.
        launcher: processes and threads.
        log: stderr of torchrun and the workers is appended here; None leaves it on the terminal.
        keep_log: if False, it is removed at the end unless an error refers to it.
        progress: returns the steps done and the newest checkpoint's step, for a worker that can resume. If given, all
            processes restart after an unrequested signal kills one, at most ``launcher.max_restarts`` times.
        memory: folder in memory for the processes' snapshots, the same for all restarts.
        elastic: decides who takes part in each start, with which arguments; by default all nodes, with ``args``.
        preload: modules that import what the processes need, once for all of them (:class:`Torchruns`). Once a step is
            done, the process that does so for a restart begins.

    Returns:
        0, the failed worker's own exit status, or 128 + signal.

    Raises:
        ConfigError: there are several nodes, and the environment does not define their rendezvous.
        RunError: the first node cannot be reached.
    """
    nodes = Nodes.from_environment(launcher.nnodes) if launcher.nnodes > 1 and elastic is None else None
    with contextlib.ExitStack() as stack:
        stderr: IO[bytes] | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            stderr = stack.enter_context(log.open("ab"))
            stderr.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {module}\n".encode())
            stderr.flush()
        child = _Child(scheduled="TLT_JOB" in os.environ)
        stack.callback(child.end_all)
        for signum in _SIGNALS:
            stack.callback(signal.signal, signum, signal.signal(signum, child.pass_on))
        torchruns = Torchruns(module, stderr, preload)
        stack.callback(torchruns.close)
        restarts = None
        if progress is not None:
            restarts = Restarts(launcher.max_restarts, progress, stderr, memory is not None, elastic is not None)
        while True:
            start: LaunchStart | None = LaunchStart(args, launcher, nodes, next(_launches))
            if elastic is not None:
                end = restarts.end if restarts is not None else RoundEnd()
                if (start := elastic.next(lambda: child.signal is not None, end)) is None:
                    return 0 if child.signal is None else 128 + child.signal
            assert start is not None
            if restarts is not None:
                restarts.adopt(start.restarts, start.failed_after)
            meanwhile: Callable[[], None] = lambda: None  # noqa: E731
            if progress is not None and restarts is not None and restarts.are_left:
                meanwhile = _Reserve(torchruns, start.launcher, progress).look
            obsolete = elastic.is_obsolete if elastic else lambda: False
            ended = _run_once(child, torchruns, start, memory, obsolete, meanwhile)
            if child.signal is not None or restarts is None or not restarts.allow(ended):
                if elastic is not None and restarts is not None and restarts.refused:
                    elastic.give_up()
                if log is not None and not keep_log and not _needs_log(child, ended):
                    log.unlink()
                return _status(child, ended, log, start.nodes)
            child.end_all()
            if child.signal is not None:  # a stop was requested between the two launches
                return 128 + child.signal
