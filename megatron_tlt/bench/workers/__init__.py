"""Scripts that benchmarks start under torchrun; each ends with its parent and writes its result to a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.platform.processes import run_processes


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
    """Runs ``workers/<name>.py`` as ``platform.processes.run_processes`` does, which says what else is given.

    Raises:
        RunError: it failed or ran past ``timeout_s``.
    """
    run_processes(what, f"megatron_tlt.bench.workers.{name}", arguments, processes, timeout_s, environment)
