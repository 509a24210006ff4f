"""torchrun whose process imports the ranks' libraries once and forks the ranks; it may do so before it is needed.

A rank that starts from nothing imports torch, Megatron-Core and vLLM first, and so does torchrun in part. Here one
process per node does it for all of them: :class:`PreloadedTorchrun` starts it, and it waits (:func:`wait_for_start`)
until it is told what to run. A launch that has one in reserve imports nothing when it restarts.

The forks are made while that process has one thread, before torchrun starts more, and wait for torchrun to hand them
out (:class:`RankForks`). They are its children, as ranks that it starts from nothing are. What differs: they share a
seed of the hash function, and tools show torchrun's command line for them (``tlt rank 0`` is their name).
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
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron_tlt.platform.processes import die_with_parent, end_with_parent

PRELOAD = "--preload"
_POLL_S = 0.02
_GPU = re.compile(r"/dev/nvidia\d+")
_POPEN = ["self", "args", "env"]


@dataclass(frozen=True)
class Start:
    """What a preloaded torchrun runs: its arguments, the environment, and the number of ranks on this node."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    ranks: int


class PreloadedTorchrun:
    """One of a launcher, for one start.

    Args:
        module: imported by it; it imports what ranks need.
        environment: as libraries read it while they are imported.
        stderr: of torchrun and its ranks; None is this process's.
    """

    def __init__(self, module: str, environment: Mapping[str, str], stderr: IO[bytes] | None) -> None:
        self._environment = dict(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_tlt.platform.torchrun", PRELOAD, module],
            env=self._environment,
            stdin=subprocess.PIPE,
            stderr=stderr,
            # Ctrl-C in a terminal reaches a whole group; the workers must receive it once, from the launcher
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether it is there and imports under that environment."""
        return self._process.poll() is None and self._environment == environment

    def start(self, start: Start) -> subprocess.Popen[bytes]:
        """Tells it what to run; it is torchrun from here on. One that has ended is returned as it is."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(asdict(start)).encode())
        return self._process

    def close(self) -> None:
        """Ends one that is not needed, with its start unsaid."""
        self._process.kill()
        self._process.communicate()


def wait_for_start(module: str) -> RankForks | None:
    """In torchrun's process: imports ``module``, waits for a start, makes it this process's, and forks the ranks.

    Returns:
        The forks; None where this process cannot be forked, after a line on standard error with the reason.

    Raises:
        SystemExit: the launcher has ended, or needs no start.
    """
    before = set(os.environ)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check of torch would forbid CUDA in forks
    reason = _import(module)
    added = {name: value for name, value in os.environ.items() if name not in before}
    request = sys.stdin.buffer.read()
    if not request:
        raise SystemExit(0)
    start = Start(**json.loads(request))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.clear()
    os.environ.update(added | dict(start.environment))
    sys.argv[1:] = start.arguments
    reason = reason or _why_not() or _changed_interface()
    if reason:
        print(f"ranks start from nothing: {reason}", file=sys.stderr, flush=True)
        return None
    gc.collect()
    gc.freeze()  # or a fork's first collection would copy every page
    return RankForks(start.ranks)


def _import(module: str) -> str:
    """Why the import failed; ranks that start from nothing then fail alike, and report it."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _why_not() -> str:
    """Why this process cannot be forked; empty where it can."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return "an import has initialized CUDA"
    if opened := [name for name in map(_target, Path("/proc/self/fd").iterdir()) if _GPU.fullmatch(name)]:
        return f"an import has opened {', '.join(opened)}"
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return f"an import has started threads: {', '.join(threads)}" if len(threads) > 1 else ""


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the listing's own
        return ""


def _changed_interface() -> str:
    """What torch's handler of subprocesses has in place of what :meth:`RankForks.install` needs; empty if nothing."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    found = list(inspect.signature(SubprocessHandler._popen).parameters)
    return "" if found == _POPEN else f"torch's SubprocessHandler._popen takes {found}, needed: {_POPEN}"


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
    """Forks that wait to become ranks."""

    def __init__(self, count: int) -> None:
        self._waiting: list[tuple[int, int]] = []
        """Each fork's process and the pipe that it reads its command from."""
        for _ in range(count):
            own, ours = os.pipe()
            pid = os.fork()
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
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as stream:
            stream.write(json.dumps([words[1:], dict(environment)]).encode())
        return ForkedRank(pid)

    def install(self) -> None:
        """Has torchrun hand out these forks where it would start processes."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        start = SubprocessHandler._popen

        def popen(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
            return self.hand_out(args, env) or start(handler, args, env)

        setattr(SubprocessHandler, "_popen", popen)  # noqa: B010


def _become_rank(pipe: int) -> None:
    """In a fork: waits for the command, runs it, and leaves by SystemExit."""
    os.setsid()
    die_with_parent(signal.SIGKILL)
    with open(pipe, "rb") as stream:
        request = stream.read()
    if not request:
        os._exit(0)
    (module, *arguments), environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the random module and torch see to it themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)
