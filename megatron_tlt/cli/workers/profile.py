"""One rank of ``tlt plan --profile``: measures this machine's devices; rank 0 writes the profile."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.planning.machine import Machine, constants, profile_text
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import (
    barrier,
    current_device,
    initialize_distributed,
    leave_distributed,
    rank,
    world_size,
)
from megatron_tlt.platform.files import atomic_write_text

# Smallest sides of the products; the other sides have this length.
_SIDES = {"cpu": (8, 32, 64, 128, 256, 512), "cuda": (64, 256, 1024, 4096)}
_LONG = {"cpu": 1024, "cuda": 8192}
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}
_REDUCED = {"cpu": 1 << 24, "cuda": 1 << 28}
_ATTENDED = {"cpu": (1, 4, 512, 64), "cuda": (1, 16, 8192, 128)}
_COLD_BYTES = 1 << 26
"""Bytes of matrices used in turn on a CPU, so that none is in a cache, like weights in training."""
_REPEATS, _CALLS, _STRETCH_S = 5, 20, 0.4


def processor_cores() -> int | None:
    """Number of cores that the ranks share; None if each has a GPU."""
    return None if torch.cuda.is_available() else int(describe_environment()["cores"])


def sharing() -> float:
    """Number of processes per core, at least 1."""
    return max(1.0, world_size() / (processor_cores() or world_size()))


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call, after a warm-up call.

    On a GPU the median of several calls. On a CPU the mean over a period in which all ranks run the same call, divided
    by the processes per core, as they take turns on the cores.
    """
    work()
    if torch.cuda.is_available():
        return _on_gpu(work)
    barrier()
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < _STRETCH_S:
        work()
        calls += 1
    return _mean_over_ranks(passed / calls) / sharing()


def collective_seconds(work: Callable[[], object]) -> float:
    """Like ``seconds_of``, for a call in which ranks wait for each other: each makes the same number of calls."""
    work()
    if torch.cuda.is_available():
        return _on_gpu(work)
    barrier()
    began = time.perf_counter()
    for _ in range(_CALLS):
        work()
    return _mean_over_ranks((time.perf_counter() - began) / _CALLS) / sharing()


def _on_gpu(work: Callable[[], object]) -> float:
    return statistics.median(_timed(work) for _ in range(_REPEATS))


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _mean_over_ranks(seconds: float) -> float:
    return statistics.mean(all_gather_data(seconds, float))


def matmul_rates(kind: str, dtype: torch.dtype) -> list[tuple[int, float]]:
    """Operations per second by the smallest side; a rate is not below that of a smaller side."""
    long, device = _LONG[kind], current_device().torch_device
    many = _COLD_BYTES // (long * long * dtype.itemsize) if kind == "cpu" else 1
    others = itertools.cycle([torch.ones(long, long, dtype=dtype, device=device) for _ in range(many)])
    rates: list[tuple[int, float]] = []
    for side in _SIDES[kind]:
        rows = torch.ones(side, long, dtype=dtype, device=device)
        rate = 2 * side * long * long / seconds_of(lambda rows=rows: rows @ next(others))  # type: ignore[misc]
        rates.append((side, max([rate, *(known for _, known in rates)])))
    return rates


def attention_rate(kind: str, dtype: torch.dtype) -> float:
    """Operations per second of causal attention, counting half the pairs."""
    batch, heads, length, width = _ATTENDED[kind]
    query = torch.ones(batch, heads, length, width, dtype=dtype, device=current_device().torch_device)
    seconds = seconds_of(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    return 2 * batch * heads * length * length * width / seconds


def copy_rate(kind: str) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(_COPIED[kind], dtype=torch.uint8, device=current_device().torch_device)
    target = torch.empty_like(source)
    return 2 * _COPIED[kind] / seconds_of(lambda: target.copy_(source))


def host_rate(kind: str) -> float:
    """Bytes per second from the device to pinned host memory, while all devices copy."""
    if kind == "cpu":
        return copy_rate(kind)
    source = torch.ones(_COPIED[kind], dtype=torch.uint8, device=current_device().torch_device)
    target = torch.empty(_COPIED[kind], dtype=torch.uint8, pin_memory=True)
    barrier()  # all devices copy at the same time
    return _COPIED[kind] / seconds_of(lambda: target.copy_(source))


def link_rate(kind: str) -> float:
    """Bytes per second per rank in an all-reduce, 2 (n - 1) / n of its tensor; with one rank, in a copy."""
    ranks = world_size()
    if ranks == 1:
        return copy_rate(kind)
    large = torch.ones(_REDUCED[kind] // 4, device=current_device().torch_device)
    return 2 * (ranks - 1) / ranks * _REDUCED[kind] / collective_seconds(lambda: dist.all_reduce(large))


def latencies() -> list[tuple[int, float]]:
    """Seconds of a small all-reduce by the number of ranks, all groups of that size in parallel."""
    ranks, found = world_size(), []
    small = torch.ones(16, device=current_device().torch_device)
    for size in sorted({*(2**power for power in range(1, ranks.bit_length())), ranks}):
        # remaining ranks form a smaller group and are measured with it
        groups = [list(range(start, min(start + size, ranks))) for start in range(0, ranks, size)]
        made = [dist.new_group(members) for members in groups]
        own = made[rank() // size]
        found.append((size, collective_seconds(lambda own=own: dist.all_reduce(small, group=own))))  # type: ignore[misc]
    return found


def main(out: str) -> None:
    torch.set_num_threads(1)
    initialize_distributed(300)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    environment = describe_environment()
    memory = torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else environment["memory_gib"] * 2**30
    rates, assumed, link = constants()["processor" if kind == "cpu" else "time"], constants()["time"], link_rate(kind)
    machine = Machine(
        name=str(environment["gpu_names"][0] if kind == "cuda" else environment["cpu"]),
        memory_bytes=float(memory),
        matmul=tuple(matmul_rates(kind, dtype)),
        attention=attention_rate(kind, dtype),
        memory_bandwidth=copy_rate(kind),
        node_link=link,
        network=link if kind == "cpu" else assumed["network"] * assumed["network_efficiency"],
        collective_latency=tuple(latencies()),
        host_link=host_rate(kind),
        decode_overhead=rates["decode_overhead"],
        overlap=0.0 if kind == "cpu" else assumed["overlap"],
        cores=processor_cores(),
        source=f"measured by {world_size()} processes",
    )
    if rank() == 0:
        atomic_write_text(Path(out), profile_text(machine))
    barrier()
    leave_distributed()


if __name__ == "__main__":
    main(sys.argv[1])
