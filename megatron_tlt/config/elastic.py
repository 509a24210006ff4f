"""The section ``elastic``: what a run does when ranks are lost."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_tlt.config.section import Section


class ElasticConfig(Section):
    """After each update, ranks copy their state into the host memory of their node, where it outlives them.

    After a killed rank all ranks restart from that copy, so at most one step is lost, whatever ``trainer.save_every``.
    On several nodes the next node has a second copy, for one that is replaced. If a copy is damaged or lost with both
    nodes, they restart from the newest checkpoint. ``memory_dir`` is a file system in memory; the copies take twice the
    bytes of weights and optimizer state of the node's ranks, on several nodes four times.

    With ``min_devices`` the launch goes on without nodes that are lost, as long as so many devices are left, with the
    fastest layout that fits them (``tlt plan --elastic``); batch, order of problems and tensor, context and expert
    parallelism stay. After a loss, nodes wait ``wait_s`` seconds at most for each other. A launcher that is started
    again on a lost node, with the same TLT_JOB, joins between two steps if that pays: a change of size takes
    ``reconfigure_s`` seconds (null: as assumed in planning/constants.yaml).

    With ``strict`` equal responses lead to weights with equal bits under every number of pipeline stages and every
    power-of-two data-parallel size: each batch is divided into ``logical_shards`` parts (null: the config's
    data-parallel size), whose gradients are summed in one tree by deterministic kernels. Layouts that cannot be strict
    are not chosen.
    """

    memory_dir: Path = Path("/dev/shm")
    min_devices: PositiveInt | None = None
    wait_s: PositiveFloat = 60.0
    reconfigure_s: NonNegativeFloat | None = None
    strict: bool = False
    logical_shards: PositiveInt | None = None
