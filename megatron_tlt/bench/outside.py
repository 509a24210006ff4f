"""The processes of a run, as a benchmark sees them from outside."""

from __future__ import annotations

import psutil

from megatron_tlt.platform.processes import RANK_NAME


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
