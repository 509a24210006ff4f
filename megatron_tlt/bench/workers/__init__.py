"""Scripts that benchmarks start under torchrun; each ends with its parent and writes its result to a file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.errors import RunError
from megatron_tlt.platform.processes import launch_environment, torchrun_command


def measure_in_worker(what: str, name: str, given: Mapping[str, Any], timeout_s: float, processes: int = 1) -> Any:
    """What ``workers/<name>.py`` found: its ranks are given plain data, a folder to work in, and a file to write.

    Raises:
        RunError: as ``run_worker``.
    """
    with tempfile.TemporaryDirectory() as work:
        out = Path(work, "out.json")
        run_worker(what, name, [json.dumps(given), work, str(out)], processes, timeout_s)
        return json.loads(out.read_text(encoding="utf-8"))


def run_worker(
    what: str,
    name: str,
    arguments: Sequence[str],
    processes: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs ``workers/<name>.py`` on that many ranks of this machine, one thread each.

    ``environment`` goes over what a launch has.

    What a worker prints shows how far it is: its lines are shown where standard error is a terminal.

    Raises:
        RunError: it failed or ran past ``timeout_s``; says ``what``, with the end of its log.
    """
    command = torchrun_command(f"megatron_tlt.bench.workers.{name}", list(arguments), processes)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(
            command, env={**launch_environment(1), **(environment or {})}, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        overdue = threading.Timer(timeout_s, process.kill)
        overdue.start()
        assert process.stdout is not None
        for line in process.stdout:
            if sys.stderr.isatty():
                print(f"{what}: {line.rstrip()}", file=sys.stderr, flush=True)
        status = process.wait()
        in_time = overdue.is_alive()
        overdue.cancel()
        log.seek(0)
        lines = log.read().splitlines()
    if not in_time:
        raise RunError(f"{what}: still running after {timeout_s} s")
    if status:
        # torchrun's own report comes last and says less than the ranks' tracebacks before it
        ranks = [line for line in lines if line.startswith("[rank")]
        raise RunError("\n".join([f"{what}: status {status}", *(ranks or lines)[-40:]]))
