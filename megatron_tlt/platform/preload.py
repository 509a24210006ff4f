"""torchrun whose process imports the ranks' libraries once and forks the ranks; it may do so before it is needed.

A rank that starts from nothing imports torch, Megatron-Core and vLLM first, and so does torchrun in part. Here one
process per node does it for all of them: :class:`PreloadedTorchrun` starts it, and it waits (:func:`wait_for_start`)
until it receives a :class:`Start`. A launch that has one in reserve imports nothing when it restarts.

The forks are made while that process has one thread, before torchrun starts more, and wait for torchrun to hand them
out (:class:`RankForks`). They are its children, as ranks that it starts from nothing are. What differs: they share a
seed of the hash function, and tools show torchrun's command line for them (their name is that of every rank). Where a
process cannot be forked it becomes a torchrun that has imported nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron_tlt.platform.processes import (
    FORK_NAME,
    PRELOADING_NAME,
    RANK_NAME,
    TORCHRUN,
    die_with_parent,
    name_thread,
    start_torchrun,
)

PRELOAD = "--preload"
NOT_FORKED = "ranks start from nothing"
"""Begins a line on standard error with the reason."""
_POLL_S = 0.02
_POPEN = ["self", "args", "env"]
_GPU = re.compile(r"/dev/nvidia\d+")


@dataclass(frozen=True)
class Start:
    """What a preloaded torchrun runs: its arguments, the environment, and the number of ranks on this node."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    ranks: int


class PreloadedTorchrun:
    """One of a launcher, for one start.

    Args:
        modules: imported by it, in this order; they import what ranks need.
        environment: as libraries read it while they are imported.
        stderr: of torchrun and its ranks; None is this process's.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes] | None) -> None:
        theirs, self._pipe = os.pipe()
        try:
            command = [sys.executable, "-m", TORCHRUN, PRELOAD, ",".join(modules), str(theirs)]
            # numpy's library starts its threads when it is loaded
            own = {"OPENBLAS_NUM_THREADS": "1", **environment}
            self._process = start_torchrun(command, own, stderr, pass_fds=(theirs,))
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)

    @property
    def is_there(self) -> bool:
        """Whether it still waits, or imports."""
        return self._process.poll() is None

    def start(self, start: Start) -> subprocess.Popen[bytes]:
        """Tells it what to run; it is torchrun from here on. One that has ended is returned as it is."""
        # a pipe takes 64 KiB while nobody reads it, and an environment may be larger
        message = json.dumps(asdict(start)).encode()
        threading.Thread(target=_write, args=(self._pipe, message), daemon=True).start()
        return self._process

    def close(self) -> None:
        """Ends one that is not needed, with its start unsaid."""
        os.close(self._pipe)
        self._process.kill()
        self._process.wait()


def _write(pipe: int, message: bytes) -> None:
    """Writes and closes; a reader that has gone needs nothing."""
    with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as stream:
        stream.write(message)


def wait_for_start(modules: str, pipe: int) -> RankForks | None:
    """In torchrun's process: imports, waits for a start, makes it this process's, and forks the ranks.

    A process that cannot be forked says on standard error why, and begins again without the imports.

    Args:
        modules: to import, separated by commas; if empty, ranks are not forks.
        pipe: descriptor that the start is read from.

    Returns:
        The forks; None if ranks are not forks.

    Raises:
        SystemExit: the launcher has ended, or needs no start.
    """
    name_thread(PRELOADING_NAME)
    before = dict(os.environ)
    if modules:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch's other check would forbid CUDA in forks
        if reason := _import(modules.split(",")) or _why_not():
            print(f"{NOT_FORKED}: {reason}", file=sys.stderr, flush=True)
            os.execve(sys.executable, [sys.executable, "-m", TORCHRUN, PRELOAD, "", str(pipe)], before)
        gc.collect()
        gc.freeze()  # or a fork's first collection would copy every page
    imported = dict(os.environ)
    with open(pipe, "rb") as stream:
        request = stream.read()
    if not request:
        raise SystemExit(0)
    start = Start(**json.loads(request))
    os.environ.clear()
    os.environ.update(_after_imports(start.environment, before, imported))
    sys.argv[1:] = start.arguments
    forks = RankForks(start.ranks) if modules else None
    name_thread("tlt torchrun")
    return forks


def _after_imports(
    environment: Mapping[str, str], before: Mapping[str, str], imported: Mapping[str, str]
) -> dict[str, str]:
    """The environment with what imports changed from ``before`` to ``imported``."""
    changed = {name: value for name, value in imported.items() if before.get(name) != value}
    return {name: value for name, value in environment.items() if name in imported or name not in before} | changed


def _import(modules: Sequence[str]) -> str:
    """Why an import failed; ranks that start from nothing then fail alike, and report it."""
    try:
        for name in modules:
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _why_not() -> str:
    """Why this process cannot be forked, or torch takes no forks; empty where it can."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return "an import has initialized CUDA"
    if opened := [name for name in map(_target, Path("/proc/self/fd").iterdir()) if _GPU.fullmatch(name)]:
        return f"an import has opened {', '.join(opened)}"
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        return f"an import has started threads: {', '.join(threads)}"
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        found = list(inspect.signature(SubprocessHandler._popen).parameters)
    except (ImportError, AttributeError) as error:
        return f"torch has no SubprocessHandler._popen: {error}"
    return "" if found == _POPEN else f"torch's SubprocessHandler._popen takes {found}, needed: {_POPEN}"


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the listing's own
        return ""


class ForkedRank:
    """A rank for torchrun: that part of ``subprocess.Popen`` which torchrun uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The status, as :attr:`subprocess.Popen.returncode`; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The status. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"rank with process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return status


class RankForks:
    """Forks that wait to become ranks; fewer than ``count`` if no further process can be made."""

    def __init__(self, count: int) -> None:
        self._waiting: list[tuple[int, int]] = []
        """Each fork's process and the pipe that it reads its command from."""
        for _ in range(count):
            own, ours = os.pipe()
            try:
                pid = os.fork()
            except OSError as error:
                print(f"{NOT_FORKED}: no further fork: {error.strerror}", file=sys.stderr, flush=True)
                os.close(own)
                os.close(ours)
                return
            if not pid:
                os.close(ours)
                for _, other in self._waiting:
                    os.close(other)
                _become_rank(own)
            os.close(own)
            self._waiting.append((pid, ours))

    def hand_out(self, command: Sequence[str], environment: Mapping[str, str]) -> ForkedRank | None:
        """A fork that runs ``python -m MODULE ARGUMENTS``; None if none is left, or the command is another one."""
        python, *words = command
        if words[:1] == ["-u"]:
            words = words[1:]
        if not self._waiting or python != sys.executable or words[:1] != ["-m"]:
            return None
        pid, pipe = self._waiting.pop(0)
        _write(pipe, json.dumps([words[1:], dict(environment)]).encode())
        return ForkedRank(pid)

    def install(self) -> None:
        """Has torchrun hand out these forks where it would start processes whose output it does not redirect."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        start = SubprocessHandler._popen

        def popen(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
            redirected = handler._stdout is not None or handler._stderr is not None
            return (not redirected and self.hand_out(args, env)) or start(handler, args, env)

        setattr(SubprocessHandler, "_popen", popen)  # noqa: B010


def _become_rank(pipe: int) -> None:
    """In a fork: waits for the command, runs it, and leaves by SystemExit."""
    os.setsid()
    die_with_parent(signal.SIGKILL)
    name_thread(FORK_NAME)
    with open(pipe, "rb") as stream:
        request = stream.read()
    if not request:
        os._exit(0)
    (module, *arguments), environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    name_thread(f"{RANK_NAME}{environment.get('RANK', '')}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the random module and torch see to it themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)
