"""Starts a launch's processes on this node, and ends them when the process that started them ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from megatron_tlt.errors import ConfigError, RanksOverdue, RunError
from megatron_tlt.platform.nodes import Nodes

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
RANK_NAME = "tlt rank "
"""A rank's number follows it in the name of its process, which top and ps show."""
FORK_NAME = "tlt fork"
PRELOADING_NAME = "tlt preload"
TORCHRUN = "megatron_tlt.platform.torchrun"
END_TORCHRUN = signal.SIGINT
"""Ends torchrun and, at most 30 s later, its workers; torchrun leaves SIGTERM to them."""


# The kernel picks the port, so none can be in use.
_ONE_NODE = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")


def torchrun_command(module: str, args: Sequence[str], nproc: int, meeting: Sequence[str] = _ONE_NODE) -> list[str]:
    """The command that launches ``nproc`` processes here; ``meeting`` has the rendezvous arguments of several nodes."""
    return [sys.executable, "-m", TORCHRUN, *torchrun_arguments(module, args, nproc, meeting)]


def torchrun_arguments(module: str, args: Sequence[str], nproc: int, meeting: Sequence[str] = _ONE_NODE) -> list[str]:
    """What follows ``torchrun`` in :func:`torchrun_command`."""
    return [
        *meeting,
        *numa_binding(),
        f"--nproc-per-node={nproc}",
        "--max-restarts=0",
        "-m",
        module,
        *args,
    ]


def numa_binding() -> list[str]:
    """torchrun's argument that binds processes to processors near their GPUs, by ``TLT_NUMA`` (default: none).

    Raises:
        ConfigError: an unknown mode, or no program numactl, which torch calls.
    """
    modes = ("none", "node", "socket", "exclusive", "core-complex")
    mode = os.environ.get("TLT_NUMA", "none")
    if mode not in modes:
        raise ConfigError(f"TLT_NUMA: found {mode!r}; allowed: {', '.join(modes)}")
    if mode == "none":
        return []
    if shutil.which("numactl") is None:
        raise ConfigError(f"TLT_NUMA: found {mode!r}, which needs the program numactl; allowed without it: 'none'")
    return [f"--numa-binding={mode}"]


def _cache_folder() -> Path:
    """A folder on this node's disk that only this user can write: compiled kernels are loaded from it."""
    folder = Path(tempfile.gettempdir(), f"megatron-tlt-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    own = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    return folder if own else Path(tempfile.mkdtemp(prefix="megatron-tlt-"))


def launch_environment(threads: int, nodes: Nodes | None = None) -> dict[str, str]:
    """The environment of a launch's processes: this process's, with ``threads`` threads for each of them."""
    caches = _cache_folder()
    return {
        # gloo hangs if the host name resolves to an address without a listener; a single node needs only loopback.
        **(nodes.environment if nodes else {"GLOO_SOCKET_IFNAME": "lo"}),
        # By default glibc returns freed tensors to the kernel and faults it in again: a third of a CPU training step.
        "MALLOC_TRIM_THRESHOLD_": str(2**31),
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        # oneDNN caches some megabytes for each shape of a product, and each packed batch has a new shape. With its
        # default of 1,024 shapes, a process of 135 M parameters grows by 100 MB per training step.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",
        # compiled kernels: on this node's disk, as a home folder is often a slow file system that all nodes share
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "VLLM_CACHE_ROOT": f"{caches}/vllm",
        # NCCL's flight recorder: the newest collectives of each rank, written when a phase hangs
        "TORCH_FR_BUFFER_SIZE": "2000",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        # vLLM's n-gram drafter would start its own threads, which compete with all others
        "NUMBA_NUM_THREADS": str(threads),
    }


_SAID_LINES = 20
"""Number of output lines that the error shows for processes that were stopped."""


def run_processes(
    what: str,
    module: str,
    arguments: Sequence[str],
    processes: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a module on several ranks of this machine, one thread each, and waits for them.

    ``environment`` overrides that of a launch. The ranks' output is shown as progress on standard error.

    Raises:
        RanksOverdue: they were still running after ``timeout_s``; shows the last output.
        RunError: they failed; shows the end of their log. Both name ``what``.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(
            torchrun_command(module, arguments, processes),
            env={**launch_environment(1), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        late = threading.Event()

        def end() -> None:
            late.set()
            kill_with_children(process.pid)

        overdue = threading.Timer(timeout_s, end)
        overdue.start()
        assert process.stdout is not None
        said: deque[str] = deque(maxlen=_SAID_LINES)
        for line in process.stdout:
            said.append(line.rstrip())
            print(f"{what}: {line.rstrip()}", file=sys.stderr, flush=True)
        status = process.wait()
        overdue.cancel()
        log.seek(0)
        lines = log.read().splitlines()
    if late.is_set():
        raise RanksOverdue("\n".join([f"{what}: still running after {timeout_s:g} s; last output:", *said]))
    if status:
        # torchrun prints its own report last, with less detail than the ranks' tracebacks before it
        ranks = [line for line in lines if line.startswith("[rank")]
        raise RunError("\n".join([f"{what}: status {status}", *(ranks or lines)[-40:]]))


def kill_with_children(pid: int) -> None:
    """Kills a process and all below it, and waits for their end.

    Ranks lead sessions of their own, so a signal to a process group does not reach them.
    """
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)


def die_with_parent(signum: int) -> None:
    """Asks the kernel to send ``signum`` to this process when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def start_torchrun(
    command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes] | None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a launcher's torchrun; ``stderr``: None is this process's; ``pass_fds``: descriptors that it inherits."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        stderr=stderr,
        pass_fds=pass_fds,
        # Ctrl-C in a terminal reaches a whole group; the workers must receive it once, from the launcher
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    """Call before torchrun starts: if the launcher is killed, the workers have 30 s to save."""
    signal.signal(END_TORCHRUN, signal.default_int_handler)  # a shell ignores SIGINT for background processes
    die_with_parent(END_TORCHRUN)


def name_thread(name: str) -> None:
    """Names the calling thread in ``top -H``, debuggers and /proc, with at most 15 characters (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def stay_with_parent() -> None:
    """For a helper process: it ignores SIGINT and SIGTERM, and is killed when its parent ends."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
