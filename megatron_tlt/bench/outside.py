"""What a benchmark sees of a run from outside: its processes, and how far it is."""

from __future__ import annotations

from pathlib import Path

import psutil

from megatron_tlt.observe.metrics import METRICS_FILE, read_metrics
from megatron_tlt.platform.processes import RANK_NAME


def recorded_steps(folder: Path) -> int:
    """The newest step in a run's metrics; 0 before the first."""
    file = folder / METRICS_FILE
    return max((int(row["step"] or 0) for row in read_metrics(file)), default=0) if file.is_file() else 0


def processes_below(launcher: int) -> list[psutil.Process]:
    """The processes that a ``tlt`` has started, and those that they have; none if it has ended."""
    try:
        return psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_below(launcher: int) -> dict[int, psutil.Process]:
    """The processes of a single node's ranks by rank; without those that have ended meanwhile."""
    ranks: dict[int, psutil.Process] = {}
    for process in processes_below(launcher):
        try:
            name = process.name()
        except psutil.Error:
            continue
        if name.startswith(RANK_NAME):
            ranks.setdefault(int(name.removeprefix(RANK_NAME)), process)  # the rank comes before what it started
    return ranks
