"""A process that has imported the heavy libraries and forks itself for whoever asks (see ``tests.helpers.warm``).

Started as ``python -u -m tests.helpers.warm_server SOCKET STAND_IN`` with a pipe for stdin: it ends, and everything it
forked with it, when that pipe is closed. It writes one line when it is ready, or why it cannot be.

It forks from its only thread, before any process group, engine or generator of random numbers was in use, so a fork is
as good as a Python that has just imported the same. What differs from such a one:
- all forks share one seed of the hash function, and the modules that were imported, in that order;
- a fork leads a session of its own, is a child of this process, and writes its streams without a buffer;
- orphans of forks come to this process, which kills them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import types
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

import psutil

from megatron_tlt.platform.processes import die_with_parent
from tests.helpers.hosts import enter_network
from tests.helpers.launch import MARK
from tests.helpers.warm_client import NO, PASSED_ON, YES, receive

END = b"e"
#: Read while modules are imported: a fork whose environment has others is refused, and a real Python takes its place.
READ_AT_IMPORT = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCHDYNAMO_DISABLE",
)
PRELOADED = (
    "torch.distributed.run",
    "megatron_tlt.cli.workers.imports_training",
    "megatron_tlt.cli.workers.imports_vllm",
    "megatron_tlt.trainer.supervised",
    "megatron_tlt.cli",
    "megatron_tlt.cli.workers.convert",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama_eagle3",
    "transformers.models.qwen2.modeling_qwen2",
    "pytest",
)


@dataclass
class Job:
    """A Python that was asked for."""

    connection: socket.socket
    argv: list[str]
    env: dict[str, str]
    cwd: str
    umask: int
    ignored: list[int]
    pid: int
    network: str
    streams: list[int] = field(default_factory=list)


class Server:
    """``next_job`` comes back in a fork, with what it has to run."""

    def __init__(self, path: str, set_by_imports: dict[str, str]) -> None:
        self._set_by_imports = set_by_imports
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._jobs: dict[int, Job] = {}
        self._ended: set[str] = set()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)

    def next_job(self) -> Job:
        """Waits and serves; in a fork, comes back. Raises SystemExit when stdin is closed."""
        while True:
            clients = {job.connection.fileno(): pid for pid, job in self._jobs.items()}
            listener = self._listener.fileno()
            ready, _, _ = select.select([0, listener, self._wake, *clients], [], [])
            if 0 in ready:
                self._end(list(self._jobs))
                raise SystemExit(0)
            for number in ready:
                if number in clients and clients[number] in self._jobs:
                    self._pass_on(clients[number])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 1 << 12)
                self._reap()
            if listener in ready:
                job = self._accept()
                if job is not None:
                    return job

    def _accept(self) -> Job | None:
        """Serves a new client. In a fork: the job."""
        connection, _ = self._listener.accept()
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        body = receive(connection, struct.unpack("!I", head)[0]) if len(head) == 4 else b""
        try:
            request: dict[str, Any] = json.loads(body)
        except ValueError:  # killed in the middle of it
            connection.close()
            return None
        if "end" in request:
            self._end_marked(request["end"])
            with contextlib.suppress(OSError):
                connection.sendall(END)
            connection.close()
            return None
        job = Job(connection, **request, streams=streams)
        if self._fork(job):
            return job
        for stream in streams:
            os.close(stream)
        return None

    def _fork(self, job: Job) -> bool:
        """True in the fork."""
        over, here = job.env.get(MARK) in self._ended, runs_here(job.argv, self._set_by_imports | job.env)
        if over or not here:
            with contextlib.suppress(OSError):
                job.connection.sendall(b"" if over else NO)
            job.connection.close()
            return False
        pid = os.fork()
        if pid:
            self._jobs[pid] = job
            with contextlib.suppress(OSError):
                job.connection.sendall(YES)
            return False
        self._leave()
        return True

    def _leave(self) -> None:
        """What a fork must not keep of the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        die_with_parent(signal.SIGKILL)
        self._listener.close()
        for number in (self._wake, self._woken):
            os.close(number)
        for job in self._jobs.values():
            job.connection.close()
        self._jobs.clear()

    def _pass_on(self, pid: int) -> None:
        """Signals from a fork's client; its end ends the fork."""
        try:
            signals = self._jobs[pid].connection.recv(64)
        except ConnectionError:
            signals = b""
        for number in signals or (signal.SIGKILL,):
            os.kill(pid, number)
        if not signals:
            self._end([pid])

    def _end_marked(self, mark: str) -> None:
        """Kills the forks of a run, and refuses it further ones."""
        self._ended.add(mark)
        self._end([pid for pid, job in self._jobs.items() if job.env.get(MARK) == mark])

    def _end(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # its session, where it is still in it
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(pid in self._jobs for pid in pids):
            self._reap()
            time.sleep(0.002)
        self._reap()

    def _reap(self) -> None:
        """Tells clients how their forks ended; kills what those leave behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            job = self._jobs.pop(pid, None)
            if job is not None:
                with contextlib.suppress(OSError):
                    job.connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
                job.connection.close()
        for child in psutil.Process().children():
            if child.pid not in self._jobs:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def runs_here(argv: list[str], env: dict[str, str]) -> bool:
    """Whether a fork can stand for that Python."""
    same = all(env.get(name) == os.environ.get(name) for name in READ_AT_IMPORT)
    arguments = [argument for argument in argv if argument != "-u"]
    return same and bool(arguments) and (arguments[0] in ("-m", "-c") or not arguments[0].startswith("-"))


def become(job: Job, stand_in: str, base_path: list[str], set_by_imports: dict[str, str]) -> types.CodeType:
    """Turns this process into the one that the job asks for; what it is to execute in ``__main__``."""
    import numpy as np
    import torch

    if job.network != os.readlink("/proc/self/ns/net"):
        enter_network(f"/proc/{job.pid}/ns/net")
    job.connection.close()
    for number, stream in enumerate(job.streams):
        os.dup2(stream, number)
        os.close(stream)
    for number in PASSED_ON:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in job.ignored else usual)
    os.chdir(job.cwd)
    os.umask(job.umask)
    os.environ.clear()
    os.environ.update(set_by_imports | job.env)
    np.random.seed()  # the random module has a hook of its own
    torch.seed()
    sys.executable = stand_in
    added = [entry for entry in job.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    argv = job.argv[job.argv[0] == "-u" :]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if argv[0] in ("-m", "-c"):
        sys.path[:] = [job.cwd if argv[0] == "-m" else "", *added, *base_path]
        sys.argv[:] = argv[1:]
        if argv[0] == "-c":
            sys.argv[0] = "-c"
            code = compile(argv[1], "<string>", "exec")
        else:
            code = module_code(argv[1], main)
            sys.argv[0] = str(main.__file__)
    else:
        sys.path[:] = [str(Path(argv[0]).resolve().parent), *added, *base_path]
        sys.argv[:] = argv
        main.__file__ = argv[0]
        code = compile(Path(argv[0]).read_bytes(), argv[0], "exec")
    return code


def module_code(name: str, main: types.ModuleType) -> types.CodeType:
    """The code of ``python -m name``; ``main`` is told where it comes from."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise SystemExit(f"{sys.executable}: No module named {name}")
    main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
    code = spec.loader.get_code(spec.name)
    assert code is not None
    return code


def why_not() -> str:
    """Why this process cannot be forked; empty where it can."""
    import torch

    if torch.cuda.is_available():
        return "CUDA cannot be used in a fork of a process that asked for it"
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return f"an import has started threads: {threads}" if len(threads) > 1 else ""


def serve(path: str, stand_in: str) -> types.CodeType:
    """Comes back in each fork, with what it is to execute."""
    base_path = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    die_with_parent(signal.SIGKILL)
    before = set(os.environ)
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # another release has it elsewhere: left to the forks
            importlib.import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if name not in before}
    reason = why_not()
    if reason:
        print(reason)
        sys.exit(1)
    adopt_orphans()
    gc.collect()
    gc.freeze()  # or a fork's first collection would copy every page
    server = Server(path, set_by_imports)
    print("ready")
    job = server.next_job()
    return become(job, stand_in, base_path, set_by_imports)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans."""
    import ctypes

    subreaper = 36
    ctypes.CDLL(None).prctl(subreaper, 1, 0, 0, 0)


def main() -> NoReturn:
    exec(serve(*sys.argv[1:]), sys.modules["__main__"].__dict__)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
