"""``tlt plan CONFIG --profile``: measures what this machine's devices reach, for plans that are made for it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import RunError
from megatron_tlt.planning.machine import read_profile
from megatron_tlt.platform.processes import launch_environment, torchrun_command

_WORKER = "megatron_tlt.cli.workers.profile"
_TIMEOUT_S = 600


def measure_machine(config: TltConfig, path: Path) -> int:
    """Measures with as many processes as the config has on a node, and writes a profile.

    Raises:
        RunError: a process failed, or it took too long; with the end of its log.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    launcher = config.launcher
    command = torchrun_command(_WORKER, [str(path)], launcher.nproc_per_node)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                command,
                env=launch_environment(1),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"--profile: still measuring after {_TIMEOUT_S} s") from error
        log.seek(0)
        lines = log.read().splitlines()
    if done.returncode:
        raise RunError("\n".join([f"--profile: status {done.returncode}", *lines[-20:]]))
    machine = read_profile(path)
    print(f"{path}: {machine.name}")
    for side, rate in machine.matmul:
        print(f"  products with a smallest side of {side}: {rate / 1e9:.1f} GFLOP/s")
    print(f"  attention {machine.attention / 1e9:.1f} GFLOP/s, memory {machine.memory_bandwidth / 1e9:.1f} GB/s")
    latency = f"{machine.collective_latency * 1e6:.0f} us when small"
    print(f"  all-reduce {machine.node_link / 1e9:.2f} GB/s per process, {latency}")
    return 0
