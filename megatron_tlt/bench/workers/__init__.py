"""Scripts that benchmarks start under torchrun; each ends with its parent and writes its result to a file."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from megatron_tlt.errors import RunError
from megatron_tlt.platform.processes import launch_environment, torchrun_command


def run_worker(what: str, name: str, arguments: Sequence[str], processes: int, timeout_s: float) -> None:
    """Runs ``workers/<name>.py`` on that many ranks of this machine, one thread each.

    Raises:
        RunError: it failed or ran past ``timeout_s``; says ``what``, with the end of its log.
    """
    command = torchrun_command(f"megatron_tlt.bench.workers.{name}", list(arguments), processes)
    try:
        done = subprocess.run(command, env=launch_environment(1), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{what}: still running after {timeout_s} s") from error
    if done.returncode:
        # torchrun's own report comes last and says less than the ranks' tracebacks before it
        ranks = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
        raise RunError("\n".join([f"{what}: status {done.returncode}", *(ranks or done.stderr.splitlines())[-40:]]))
