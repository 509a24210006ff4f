"""A measurement's own process: ``python -m tools.bench.gpu_measure.child JOB.json``."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from megatron_tlt.platform.processes import die_with_parent
from tools.bench.gpu_measure.measurement import Settings


class Job:
    """What a measurement's function gets.

    ``given`` is the measurement's own, ``work`` an empty folder that is removed afterwards, ``out`` the part's.
    """

    def __init__(self, given: dict[str, Any], settings: Settings, work: Path, out: Path, rows: Path) -> None:
        self.given, self.settings, self.work, self.out = given, settings, work, out
        self._rows = rows

    def emit(self, **row: Any) -> None:
        """Adds a row at once: a later failure does not lose it."""
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def main(path: str) -> int:
    die_with_parent(signal.SIGKILL)
    described = json.loads(Path(path).read_text(encoding="utf-8"))
    folder = Path(path).parent
    work = folder / "work"
    work.mkdir()
    settings, out = Settings(**described["settings"]), Path(described["out"])
    job = Job(described["given"], settings, work, out, folder / "rows.jsonl")
    module, _, name = described["function"].partition(":")
    status = 0
    try:
        getattr(importlib.import_module(f"tools.bench.gpu_measure.{module}"), name)(job)
    except Exception as error:  # whatever it is: the record names it, and other measurements go on
        traceback.print_exc()
        found = {"type": type(error).__name__, "message": str(error)[:2000]}
        (folder / "error.json").write_text(json.dumps(found), encoding="utf-8")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of engines and of process groups do not delay or change it


if __name__ == "__main__":
    main(sys.argv[1])
