"""Changes of the nodes of this run's launch: noticed between two steps, by all ranks at the same one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.config.elastic import ElasticConfig
from megatron_tlt.platform.collectives import all_gather_data, broadcast_data
from megatron_tlt.platform.device import rank
from megatron_tlt.platform.membership import (
    MEMBERSHIP,
    BeatWatch,
    leave_out,
    left_out_nodes,
    newest_round,
    waiting_nodes,
)
from megatron_tlt.platform.nodes import node_index


class NodeChanges:
    """Reads on rank 0 who waits for a place, and writes who loses it.

    Args:
        folder: of the launch, as its launchers share it.
        least: devices that must be left, ``elastic.min_devices``.
    """

    def __init__(self, folder: Path, least: int) -> None:
        self._folder, self._least = folder, least
        self._watch = BeatWatch(folder)
        self._nodes = all_gather_data(node_index(), int)  # indices in the launch, some of which may be lost

    @classmethod
    def of_launch(cls, elastic: ElasticConfig | None) -> NodeChanges | None:
        """Those of the launch that started this process; None if its nodes cannot change."""
        folder = os.environ.get(MEMBERSHIP)
        if not folder or elastic is None or elastic.min_devices is None:
            return None
        return cls(Path(folder), elastic.min_devices)

    def look(self, slow: Sequence[int] = ()) -> str:
        """Which nodes join or are left out now, the same on all ranks; empty for none; a collective over the world.

        Args:
            slow: ranks whose nodes are to be left out, if enough devices remain.
        """
        return broadcast_data(self._change(slow) if rank() == 0 else None, str)

    def _change(self, slow: Sequence[int]) -> str:
        if back := waiting_nodes(self._watch):
            return f"node {_listed(back)} joins"
        found = newest_round(self._folder)
        if not slow or found is None:
            return ""
        slow_nodes = {self._nodes[one] for one in slow}
        new = sorted(slow_nodes - left_out_nodes(self._folder))
        devices = sum(member.devices for member in found.members if member.index not in slow_nodes)
        if not new or devices < self._least:
            return ""
        leave_out(self._folder, new)
        return f"node {_listed(new)} is left out, because it is slow,"


def _listed(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))
