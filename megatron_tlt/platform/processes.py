"""Starting a launch's processes on this node, and ending with the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from megatron_tlt.errors import RunError
from megatron_tlt.platform.nodes import Nodes

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
END_TORCHRUN = signal.SIGINT
"""What ends torchrun and, 30 s later at the latest, its workers; SIGTERM it leaves to them."""


# The kernel picks the port, so none can be in use.
_ONE_NODE = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")


def torchrun_command(module: str, args: Sequence[str], nproc: int, meeting: Sequence[str] = _ONE_NODE) -> list[str]:
    """The command of a launch of ``nproc`` processes here; of several nodes, ``meeting`` is how they meet."""
    return [
        sys.executable,
        "-m",
        "megatron_tlt.platform.torchrun",
        *meeting,
        f"--nproc-per-node={nproc}",
        "--max-restarts=0",
        "-m",
        module,
        *args,
    ]


def launch_environment(threads: int, nodes: Nodes | None = None) -> dict[str, str]:
    """What the processes of a launch find in their environment: this one's, with ``threads`` for each of them."""
    return {
        # A host name that resolves to an address nobody listens on makes gloo hang; one node needs no other interface.
        **(nodes.environment if nodes else {"GLOO_SOCKET_IFNAME": "lo"}),
        # glibc hands every freed tensor back to the kernel and faults it in again: on a CPU a third of a training step.
        "MALLOC_TRIM_THRESHOLD_": str(2**31),
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        # oneDNN keeps some megabytes for each shape that a product had, and packed batches have a new shape each time:
        # with its default of 1,024 shapes a process of 135 M parameters grows by 100 MB per training step
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        # the n-gram drafter of vLLM would start threads of its own, which then spin beside everything else
        "NUMBA_NUM_THREADS": str(threads),
    }


_SAID_LINES = 20
"""Of what processes printed, so many lines stand in the error of those that were given up."""


def run_processes(
    what: str,
    module: str,
    arguments: Sequence[str],
    processes: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a module on that many ranks of this machine, one thread each, and waits for them.

    ``environment`` goes over what a launch has. What a rank prints shows how far it is: its lines are shown where
    standard error is a terminal.

    Raises:
        RunError: it failed, or ran past ``timeout_s``; says ``what``, with the end of its log or of what it printed.
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
        overdue = threading.Timer(timeout_s, process.kill)
        overdue.start()
        assert process.stdout is not None
        said: deque[str] = deque(maxlen=_SAID_LINES)
        for line in process.stdout:
            said.append(line.rstrip())
            if sys.stderr.isatty():
                print(f"{what}: {line.rstrip()}", file=sys.stderr, flush=True)
        status = process.wait()
        in_time = overdue.is_alive()
        overdue.cancel()
        log.seek(0)
        lines = log.read().splitlines()
    if not in_time:
        raise RunError("\n".join([f"{what}: still running after {timeout_s:g} s; the last that it said:", *said]))
    if status:
        # torchrun's own report comes last and says less than the ranks' tracebacks before it
        ranks = [line for line in lines if line.startswith("[rank")]
        raise RunError("\n".join([f"{what}: status {status}", *(ranks or lines)[-40:]]))


def die_with_parent(signum: int) -> None:
    """Asks the kernel to send this process ``signum`` when its parent is gone (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def end_with_parent() -> None:
    """For torchrun, before it is: where the launcher is killed the workers have 30 s to save."""
    signal.signal(END_TORCHRUN, signal.default_int_handler)  # a shell ignores it for what runs in the background
    die_with_parent(END_TORCHRUN)


def name_thread(name: str) -> None:
    """Shows the calling thread under the first 15 characters of ``name`` in ``top -H``, debuggers and /proc (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def stay_with_parent() -> None:
    """For a process that works for its parent: it leaves signals to the parent, and ends when the parent does."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
