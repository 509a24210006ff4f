"""``tlt plan CONFIG --profile``: measures this machine's achieved rates, for later plans."""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.planning.machine import read_profile
from megatron_tlt.platform.processes import run_processes

_WORKER = "megatron_tlt.cli.workers.profile"
_TIMEOUT_S = 600


def measure_machine(config: TltConfig, path: Path) -> int:
    """Measures with the config's processes per node, and writes a profile.

    Raises:
        RunError: a process failed or took too long; shows the end of its log.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    processes = config.launcher.nproc_per_node
    run_processes("--profile", _WORKER, [str(path)], processes, _TIMEOUT_S)
    machine = read_profile(path)
    print(f"{path}: {machine.name}")
    for side, rate in machine.matmul:
        print(f"  products with a smallest side of {side}: {rate / 1e9:.1f} GFLOP/s")
    print(f"  attention {machine.attention / 1e9:.1f} GFLOP/s, memory {machine.memory_bandwidth / 1e9:.1f} GB/s")
    print(f"  all-reduce {machine.node_link / 1e9:.2f} GB/s per process")
    for ranks, seconds in machine.collective_latency:
        print(f"  a small all-reduce among {ranks}: {seconds * 1e6:.0f} us")
    if machine.sharing(processes) > 1:
        print(f"  rates are per process with its own core; {processes} processes share {machine.cores} cores")
    return 0
