"""Figures of a plan as plain data for tables and files; pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_tlt.planning.cost import StepTime
from megatron_tlt.planning.engine_memory import base_copy
from megatron_tlt.planning.job import Job
from megatron_tlt.planning.layout_search import SearchResult, overrides_of
from megatron_tlt.planning.machine import Machine
from megatron_tlt.planning.memory import MemoryPlan
from megatron_tlt.planning.snapshots import snapshot_bytes


def summarize_step(job: Job, machine: Machine, memory: MemoryPlan, seconds: StepTime, moved: int) -> dict[str, Any]:
    """Memory in bytes by phase and pipeline stage, seconds by phase; ``moved``: total bytes that a reshard moves."""
    return {
        "parameters": job.model.parameters,
        "actor": str(job.actor.layout),
        "recompute": str(job.actor.recompute),
        "engines": f"{job.engines} engines of TP{job.engine.tp}",
        "processes": job.world,
        "machine": machine.name,
        "machine_source": machine.source,
        "optimizer_unknown": job.actor.optimizer.unknown,
        "memory": {
            "capacity": memory.capacity,
            "margin": memory.margin,
            "fits": memory.fits,
            "cache_tokens": max(0, int(memory.cache_tokens)),
            "longest": memory.longest,
            "phases": [
                {"phase": row.phase, "stage": row.stage, "total": row.total, "parts": row.parts}
                for row in memory.phases
            ],
        },
        "seconds": {**asdict(seconds), "total": seconds.total},
        "reshard_bytes": moved,
        "snapshot_bytes": snapshot_bytes(job) if job.snapshots else 0.0,
        # on CPUs a part of each phase
        "base_copy_bytes": 0.0 if machine.is_cpu else min(job.devices_per_node, job.world) * base_copy(job),
    }


def summarize_search(job: Job, machine: Machine, result: SearchResult) -> dict[str, Any]:
    """The choices found, the fastest first."""
    return {
        "parameters": job.model.parameters,
        "processes": job.world,
        "machine": machine.name,
        "machine_source": machine.source,
        "layouts": result.layouts,
        "choices": result.choices,
        "best": [
            {
                "actor": str(found.job.actor.layout),
                "recompute": found.job.actor.recompute.described(),
                "max_tokens_per_micro_batch": found.job.actor.max_tokens,
                "engines": f"{found.job.engines}xTP{found.job.engine.tp}",
                "seconds": {**asdict(found.seconds), "total": found.total},
                "margin": found.margin,
                "config": overrides_of(found.job),
            }
            for found in result.best
        ],
    }
