"""Host memory of a run's snapshots (section ``elastic``); pure."""

from __future__ import annotations

from megatron_tlt.planning.actor_memory import stage_memory
from megatron_tlt.planning.job import Job

_SLOTS = 2


def snapshot_bytes(job: Job) -> float:
    """Bytes in ``elastic.memory_dir`` of a node whose ranks all are of the fullest pipeline stage.

    Each rank has two slots; on several nodes also two for another rank's.
    """
    copies = 2 if job.world > job.devices_per_node else 1
    return min(job.devices_per_node, job.world) * slot_bytes(job) * _SLOTS * copies


def slot_bytes(job: Job) -> float:
    """Bytes of one snapshot of a rank of the fullest stage: its weights and what it owns of the optimizer."""
    replicas = job.actor.layout.dp * job.actor.layout.cp
    stages = stage_memory(job)
    # the optimizer's own copy of float32 weights is the weights themselves, and is kept with both
    again = 0 if job.actor.bf16 or job.actor.optimizer.owned != "slices" else 4 * job.actor.trained / replicas
    return max(stage.weights + stage.optimizer + again * stage.held.total for stage in stages)
