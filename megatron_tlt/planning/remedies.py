"""Suggests the fewest changes with which a config fits, as command-line overrides; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from megatron_tlt.config.layouts import problems, tensor_problems
from megatron_tlt.planning.job import Job, Recompute
from megatron_tlt.planning.memory import MemoryPlan

_MEGATRON = "actor.megatron"
_MOST_CHANGES = 3
_SMALL_CHUNK = 1024


@dataclass(frozen=True)
class Change:
    """One changed key, or several that belong together; at most one change of each ``kind`` is used."""

    kind: str
    overrides: tuple[str, ...]
    apply: Callable[[Job], Job]


@dataclass(frozen=True)
class Remedy:
    """Changes with which a job fits, and the margin they leave in bytes."""

    overrides: tuple[str, ...]
    margin: float


def remedies(job: Job, plan: Callable[[Job], MemoryPlan]) -> list[Remedy]:
    """Up to three sets of as few changes as possible with which ``plan`` fits; widest margin first."""
    changes = list(_changes(job))
    for number in range(1, _MOST_CHANGES + 1):
        found = [remedy for chosen in combinations(changes, number) if (remedy := _tried(job, chosen, plan))]
        if found:
            return sorted(found, key=lambda remedy: (-remedy.margin, remedy.overrides))[:3]
    return []


def _tried(job: Job, chosen: tuple[Change, ...], plan: Callable[[Job], MemoryPlan]) -> Remedy | None:
    if len({change.kind for change in chosen}) < len(chosen):
        return None
    for change in chosen:
        job = change.apply(job)
    if not _allowed(job):
        return None
    memory = plan(job)
    return Remedy(tuple(o for change in chosen for o in change.overrides), memory.margin) if memory.fits else None


def _allowed(job: Job) -> bool:
    layout, shape, engine = job.actor.layout, job.model.shape, job.engine
    if problems(layout, shape) or job.responses // job.mini_batches < layout.dp or job.world % engine.tp:
        return False
    if shape.moe_ffn and shape.moe_ffn % engine.tp and not engine.spread_experts:
        return False
    return not any(tensor_problems("rollout.tensor_parallel_size", engine.tp, shape))


def _of(part: str, **values: Any) -> Callable[[Job], Job]:
    """Changes values of a part of a job, such as ``actor.layout``."""

    def changed(owner: Any, path: list[str]) -> Any:
        if not path:
            return replace(owner, **values)
        return replace(owner, **{path[0]: changed(getattr(owner, path[0]), path[1:])})

    return lambda job: changed(job, part.split("."))


def _changes(job: Job) -> Iterator[Change]:
    layout = job.actor.layout
    for factor in (2, 4, 8):
        tp, pp, cp, ep = (size * factor for size in (layout.tp, layout.pp, layout.cp, layout.ep))
        if tp <= job.devices_per_node:
            overrides = [f"{_MEGATRON}.tensor_model_parallel_size={tp}"]
            overrides += [] if layout.sp else [f"{_MEGATRON}.sequence_parallel=true"]
            yield Change("tp", tuple(overrides), _of("actor.layout", tp=tp, sp=True))
        yield Change("pp", (f"{_MEGATRON}.pipeline_model_parallel_size={pp}",), _of("actor.layout", pp=pp))
        yield Change("cp", (f"{_MEGATRON}.context_parallel_size={cp}",), _of("actor.layout", cp=cp))
        if job.model.experts:
            yield Change("ep", (f"{_MEGATRON}.expert_model_parallel_size={ep}",), _of("actor.layout", ep=ep))
        engine = job.engine.tp * factor
        if engine <= job.devices_per_node:
            yield Change("engine", (f"rollout.tensor_parallel_size={engine}",), _of("engine", tp=engine))
    yield from _smaller(job)


def _smaller(job: Job) -> Iterator[Change]:
    """Changes that keep the layout."""
    actor, engine, drafter = job.actor, job.engine, job.drafter
    longest = job.prompt_tokens + job.response_tokens
    if actor.recompute.granularity != "full":
        keys = (("granularity", "full"), ("method", "uniform"), ("num_layers", 1))
        overrides = tuple(f"{_MEGATRON}.recompute_{key}={value}" for key, value in keys)
        yield Change("recompute", overrides, _of("actor", recompute=Recompute("full")))
    if actor.max_tokens > longest:
        key = "actor.max_tokens_per_micro_batch"
        yield Change("tokens", (f"{key}={longest}",), _of("actor", max_tokens=longest))
    if actor.chunk_tokens > _SMALL_CHUNK:
        key = "actor.log_prob_chunk_tokens"
        yield Change("chunk", (f"{key}={_SMALL_CHUNK}",), _of("actor", chunk_tokens=_SMALL_CHUNK))
    if engine.cache_tokens is None:
        for share in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9):
            if share != engine.utilization:
                key = "rollout.vllm.gpu_memory_utilization"
                yield Change("utilization", (f"{key}={share}",), _of("engine", utilization=share))
    if drafter is not None and drafter.steps > 1:
        yield Change("drafter", ("drafter.unroll_steps=1",), _of("drafter", steps=1))
    if drafter is not None and drafter.max_tokens > longest:
        key = "drafter.max_tokens_per_micro_batch"
        yield Change("drafter tokens", (f"{key}={longest}",), _of("drafter", max_tokens=longest))
