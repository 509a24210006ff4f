"""Small jobs to plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_tlt.config.layouts import Layout
from megatron_tlt.planning.job import ActorJob, EngineJob, Job, Recompute
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.optimizer_state import OptimizerMemory

SEVEN = ModelSize(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True, dense_ffn=18944)
MOE = ModelSize(48, 2048, 32, 4, 128, 768, 151936, qk_norm=True, experts=128, top_k=8, dense_ffn=6144)


def job(model: ModelSize = SEVEN, layout: Layout | None = None, **changes: Any) -> Job:
    """A run with responses of 14k tokens; ``changes`` are of its actor, then of the job itself."""
    actor = ActorJob(
        layout=layout or Layout(8, tp=4, sp=True),
        bf16=True,
        fused=True,
        recompute=Recompute(),
        max_tokens=16384,
        chunk_tokens=2048,
        optimizer=OptimizerMemory(12),
        gradient_bytes=4,
    )
    of_actor = {key: changes.pop(key) for key in list(changes) if key in ActorJob.__dataclass_fields__}
    whole = Job(
        model=model,
        actor=replace(actor, **of_actor),
        engine=EngineJob(1, False, 2, 2, 0.7, 256, 8192),
        drafter=None,
        spot=False,
        devices_per_node=8,
        prompt_tokens=2048,
        response_tokens=14336,
        responses=512,
        mini_batches=1,
        staging_bytes=2.0**28,
    )
    return replace(whole, **changes)
