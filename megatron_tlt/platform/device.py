"""Selects the device of this process: CUDA with NCCL, or CPU with gloo. No other module distinguishes them."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from megatron_tlt.errors import ConfigError, RanksLost, RunError
from megatron_tlt.platform.lost_ranks import start_pulse
from megatron_tlt.platform.membership import MEMBERSHIP


@dataclass(frozen=True)
class Device:
    """A process's device: torch device, collective backend, and memory queries."""

    torch_device: torch.device
    backend: str
    _peaks: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def memory_bound(self, nbytes: int | None) -> Iterator[Callable[[], None]]:
        """Yields a check for the block to call between pieces of work: raises RunError where it took over ``nbytes``.

        It asks the driver. torch's own limit counts the memory of an engine that sleeps as taken, and would stay in
        force after the block. No limit on CPU.
        """
        if nbytes is None or not self.is_cuda:
            yield lambda: None
            return
        torch.cuda.empty_cache()
        before = self._free_bytes()

        def check() -> None:
            taken = before - self._free_bytes()
            if taken > nbytes:
                raise RunError(f"device memory: {taken / 2**30:.1f} GiB taken; allowed: {nbytes / 2**30:.1f} GiB")

        try:
            yield check
        finally:
            torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    @property
    def offloads(self) -> bool:
        """Whether the device has its own memory, so that a phase can offload to host memory."""
        return self.is_cuda

    def memory_bytes(self) -> int:
        """Bytes of device memory in use, by the driver; on CPU the resident size of this process.

        One process uses a GPU. torch's own figure counts the memory of an engine that sleeps.
        """
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            return int(total - free)
        return int(psutil.Process().memory_info().rss)

    def peak_memory_bytes(self) -> int:
        """Highest bytes in use since the last call; on CPU resident bytes of this process.

        On a GPU: what is in use, and by how much torch's reserved memory was higher since the last call; or more, if
        :meth:`note_peak` has found more.
        """
        if self.is_cuda:
            self.note_peak()
            peak = max(self._peaks)
            self._peaks.clear()
            return peak
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        with contextlib.suppress(OSError):  # a container may forbid it: then it is the highest of all times
            Path("/proc/self/clear_refs").write_text("5")
        return int(fields["VmHWM"].split()[0]) * 1024

    def note_peak(self) -> None:
        """Call before an engine wakes: its memory is not in torch's statistics.

        What torch has given back before and what the engine takes afterwards are not in use at the same time.
        """
        if self.is_cuda:
            fell = torch.cuda.max_memory_reserved(self.torch_device) - torch.cuda.memory_reserved(self.torch_device)
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            self._peaks.append(self.memory_bytes() + int(fell))

    def children_memory_bytes(self) -> int:
        """Host memory of this process's children on a CPU (verifiers); 0 on a GPU, which they do not use."""
        total = 0
        for child in psutil.Process().children(recursive=True) if not self.is_cuda else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += child.memory_full_info().uss  # a forked child shares its other pages with this process
        return total

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of memory of a GPU; None for a CPU."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1]) if self.is_cuda else None


@cache
def current_device() -> Device:
    """The GPU of this process's local rank if CUDA is available, else the CPU."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0"))
        count = torch.cuda.device_count()
        if index >= count:
            raise ConfigError(
                f"launcher.nproc_per_node: local rank {index} has no GPU: {count} present; allowed: at most {count}"
            )
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), "nccl")
    return Device(torch.device("cpu"), "gloo")


def prepare_imports() -> None:
    """Prepares the imports of ``megatron`` and vLLM; uses no device and starts no thread, so a fork is possible yet."""
    # Each rank runs its engine in the actor's process: the engine must not fork its own core process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if not torch.cuda.is_available():
        from megatron_tlt.platform import megatron_cpu

        megatron_cpu.install()
        # vLLM spends tens of seconds compiling its log-prob kernels in C++, and saves only microseconds here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # switches of NVLink add in the order of arrival
    "NCCL_ALGO": "^NVLS,NVLSTree",
}
"""What libraries read in the environment: cuBLAS, Transformer Engine, NCCL."""


def prepare(tensor_parallel_size: int = 1, deterministic: bool = False) -> Device:
    """Prepares the libraries for this device; call it before anything imports ``megatron``.

    With tensor parallelism Megatron overlaps a layer's collectives with its products, which takes kernels that start in
    the order in which they were launched. ``deterministic`` selects deterministic kernels of all libraries, Megatron's
    too (``actor/megatron_config.py``); where the environment already has a value of its own, that one is used.
    """
    if deterministic:
        for name, value in _DETERMINISTIC.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True, warn_only=True)
    if tensor_parallel_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    prepare_imports()
    device = current_device()
    if not device.is_cuda:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return device


_DEFAULT_TIMEOUT_S = 600
_timeout_s = _device_timeout_s = _DEFAULT_TIMEOUT_S
_TORCH_RECORD = "TORCH_FR_DUMP_TEMP_FILE"
"""Where torch's watchdog writes a process's newest collectives as it ends it; the rank's number follows."""


def initialize_distributed(
    timeout_s: int = _DEFAULT_TIMEOUT_S, nccl_timeout_s: int | None = None, logs: Path | None = None
) -> None:
    """Joins the process group that torchrun describes in the environment (world size 1 without torchrun).

    ``timeout_s`` limits the rendezvous, and collectives of the world and of groups created later
    (``collective_timeout_s``); ``nccl_timeout_s``, if given, those of NCCL, whose end is torch's watchdog's. The
    watchdog writes its record into ``logs``. Raises RunError if the rendezvous fails, for instance because its port is
    in use.
    """
    global _timeout_s, _device_timeout_s
    if dist.is_initialized():
        return
    _timeout_s = _device_timeout_s = timeout_s
    if logs is not None:
        os.environ.setdefault(_TORCH_RECORD, str(logs.absolute() / "torch-collectives-rank"))
    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(current_device().backend, store=store, rank=0, world_size=1)
        return
    try:
        dist.init_process_group(current_device().backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        # another start may meet other nodes
        kind = RanksLost if os.environ.get(MEMBERSHIP) else RunError
        raise kind(f"rendezvous at {where} failed: {str(error).splitlines()[0]}; is the port in use?") from error
    if nccl_timeout_s is not None and current_device().is_cuda:
        _device_timeout_s, limit = nccl_timeout_s, timedelta(seconds=nccl_timeout_s)
        dist.distributed_c10d._set_pg_timeout(limit)
        # of groups that are created without one, as vLLM's
        dist.distributed_c10d.default_pg_nccl_timeout = limit
    start_pulse(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


def leave_distributed() -> None:
    """Frees all process groups; the end of a rank that has done its work and has nothing left to exchange.

    Otherwise gloo's threads may release Python objects while Python ends, which aborts the process ("terminate called
    without an active exception"). NCCL aborts its connections, and may report peers that left before as lost.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def collective_timeout_s() -> int:
    """Timeout in seconds for subgroups on the host, which gloo connects."""
    return _timeout_s


def device_timeout_s() -> int:
    """Timeout in seconds for subgroups of the device's backend.

    Without it each library uses its own default (Megatron: 30 minutes).
    """
    return _device_timeout_s


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def node_index() -> int:
    """Index of this process's node in the launch, from 0."""
    return int(os.environ.get("GROUP_RANK", "0"))


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def log_once(message: str) -> None:
    """Prints a line on standard error, on rank 0 only."""
    if rank() == 0:
        print(message, file=sys.stderr, flush=True)


def show(line: str) -> None:
    """Prints a line from rank 0 for the user, once on the terminal and once in the log.

    A launch redirects its ranks' standard error to a log file; rank 0's standard output stays on the terminal.
    """
    if rank() != 0:
        return
    print(line, file=sys.stderr, flush=True)
    if not os.path.sameopenfile(1, 2):
        print(line, flush=True)


def warn(message: str) -> None:
    """Prints a warning with :func:`show`."""
    show(f"warning: {message}")
