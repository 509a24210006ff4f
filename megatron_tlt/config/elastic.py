"""The section ``elastic``: what a run does when ranks are lost."""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.config.section import Section


class ElasticConfig(Section):
    """After each update, ranks copy their state into the host memory of their node, where it outlives them.

    After a killed rank all ranks restart from that copy, so at most one step is lost, whatever ``trainer.save_every``.
    On several nodes the next node has a second copy, for one that is replaced. If a copy is damaged or lost with both
    nodes, they restart from the newest checkpoint. ``memory_dir`` is a file system in memory; the copies take twice the
    bytes of weights and optimizer state of the node's ranks, on several nodes four times.
    """

    memory_dir: Path = Path("/dev/shm")
