"""Scripts that benchmarks start under torchrun; each ends with its parent and writes its result to a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.platform.processes import run_processes


def measure_in_worker(what: str, name: str, given: Mapping[str, Any], timeout_s: float, processes: int = 1) -> Any:
    """Result of ``workers/<name>.py``: its ranks get plain data, a working folder, and an output file.

    Raises:
        RunError: see ``run_worker``.
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
    """Runs ``workers/<name>.py`` with ``platform.processes.run_processes``, which documents the other arguments.

    Raises:
        RunError: it failed or exceeded ``timeout_s``.
    """
    run_processes(what, f"megatron_tlt.bench.workers.{name}", arguments, processes, timeout_s, environment)
