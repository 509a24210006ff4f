"""Nodes that wait for a place in the launch of this run: noticed between two steps, by all ranks at the same one."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_tlt.platform.collectives import broadcast_data
from megatron_tlt.platform.device import rank
from megatron_tlt.platform.membership import MEMBERSHIP, BeatWatch, waiting_nodes


class WaitingNodes:
    """Reads on rank 0 who waits; ``folder`` is the launch's, as its launchers share it."""

    def __init__(self, folder: Path) -> None:
        self._watch = BeatWatch(folder)

    @classmethod
    def of_launch(cls) -> WaitingNodes | None:
        """Those of the launch that started this process; None if its nodes cannot change."""
        folder = os.environ.get(MEMBERSHIP)
        return cls(Path(folder)) if folder else None

    def look(self) -> list[int]:
        """Nodes that wait for a place which pays, the same on all ranks; a collective over the world."""
        return broadcast_data(waiting_nodes(self._watch) if rank() == 0 else None, list[int])
