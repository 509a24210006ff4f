"""One rank of ``tlt plan --profile``: what this machine's devices reach; rank 0 writes the profile."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.planning.machine import constants, from_measurements, profile_text
from megatron_tlt.platform.device import barrier, current_device, initialize_distributed, rank, world_size
from megatron_tlt.platform.files import atomic_write_text

# Smallest sides of products; the others are this long.
_SIDES = {"cpu": (8, 32, 64, 128, 256, 512), "cuda": (64, 256, 1024, 4096)}
_LONG = {"cpu": 1024, "cuda": 8192}
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}
_REDUCED = {"cpu": 1 << 24, "cuda": 1 << 28}
_ATTENDED = {"cpu": (1, 4, 512, 64), "cuda": (1, 16, 8192, 128)}
_REPEATS = 5


def seconds_of(work: Callable[[], object]) -> float:
    """Median over some repeats, behind one that is not counted."""
    times = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def matmul_rates(kind: str, dtype: torch.dtype) -> list[tuple[int, float]]:
    """Operations per second by the smallest side; a rate is not below that of a smaller side."""
    long, device = _LONG[kind], current_device().torch_device
    other = torch.ones(long, long, dtype=dtype, device=device)
    rates: list[tuple[int, float]] = []
    for side in _SIDES[kind]:
        rows = torch.ones(side, long, dtype=dtype, device=device)
        rate = 2 * side * long * long / seconds_of(lambda rows=rows: rows @ other)  # type: ignore[misc]
        rates.append((side, max([rate, *(known for _, known in rates)])))
    return rates


def attention_rate(kind: str, dtype: torch.dtype) -> float:
    """Operations per second of causal attention, half the pairs counted."""
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
    """Bytes per second from the device to pinned host memory, with all devices at it."""
    if kind == "cpu":
        return copy_rate(kind)
    source = torch.ones(_COPIED[kind], dtype=torch.uint8, device=current_device().torch_device)
    target = torch.empty(_COPIED[kind], dtype=torch.uint8, pin_memory=True)
    barrier()
    return _COPIED[kind] / seconds_of(lambda: target.copy_(source))


def link(kind: str) -> tuple[float, float]:
    """Bytes per second that a rank moves in an all-reduce, (2 (n - 1) / n of its tensor), and a small one's seconds."""
    ranks, device = world_size(), current_device().torch_device
    large = torch.ones(_REDUCED[kind] // 4, device=device)
    small = torch.ones(16, device=device)
    barrier()
    seconds, latency = (seconds_of(lambda t=t: dist.all_reduce(t)) for t in (large, small))  # type: ignore[misc]
    return 2 * (ranks - 1) / ranks * _REDUCED[kind] / seconds, latency


def main(out: str) -> None:
    torch.set_num_threads(1)
    initialize_distributed(300)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    moved, latency = link(kind)
    to_host = host_rate(kind)
    barrier()
    if rank() == 0:
        # alone: what a core or device reaches by itself
        environment = describe_environment()
        rates = matmul_rates(kind, dtype)
        cores = int(environment["cores"]) if kind == "cpu" else None
        memory = (
            torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else environment["memory_gib"] * 2**30
        )
        machine = from_measurements(
            name=str(environment["gpu_names"][0] if kind == "cuda" else environment["cpu"]),
            memory_bytes=float(memory),
            matmul=tuple(rates),
            attention=attention_rate(kind, dtype),
            memory_bandwidth=copy_rate(kind),
            node_link=moved,
            collective_latency=latency,
            host_link=to_host,
            cores=cores,
            source=f"measured by {world_size()} processes",
            network=constants()["time"]["network"] * constants()["time"]["network_efficiency"],
        )
        atomic_write_text(Path(out), profile_text(machine))
    barrier()


if __name__ == "__main__":
    main(sys.argv[1])
