"""Memory per device and phase of a step, and whether it fits; pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.planning.actor_memory import StageMemory, stage_memory
from megatron_tlt.planning.engine_memory import base_copy, drafter_memory, engine_memory
from megatron_tlt.planning.job import Job
from megatron_tlt.planning.machine import constants
from megatron_tlt.speculation.graph_pool import GraphPlan

GB = 1e9
POLICY_IS_BUILT = "start, policy"
"""The phase before there is an engine."""


@dataclass(frozen=True)
class PhaseMemory:
    """Peak memory of a phase on the devices of one pipeline stage, in bytes by use."""

    phase: str
    stage: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Every phase of every pipeline stage on devices of ``capacity`` bytes."""

    capacity: float
    phases: tuple[PhaseMemory, ...]
    cache_tokens: float
    """Tokens that an engine's KV cache holds."""
    longest: int
    """Tokens of the longest sequence."""
    reserve: float = 0.0
    """Fraction of the capacity that must be left."""

    @property
    def fullest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def margin(self) -> float:
        """Bytes left on the fullest device in the fullest phase; negative if it does not fit."""
        return self.capacity - self.fullest.total

    @property
    def fits(self) -> bool:
        return self.margin >= self.reserve * self.capacity and self.cache_tokens >= self.longest

    def problems(self) -> list[str]:
        """Reasons why it does not fit, one line each."""
        lines = []
        if self.margin < 0:
            fullest = self.fullest
            largest = sorted(fullest.parts.items(), key=lambda part: -part[1])[:3]
            lines.append(
                f"{fullest.phase} takes {fullest.total / GB:.1f} GB on the devices of pipeline stage {fullest.stage}; "
                f"allowed: {self.capacity / GB:.1f} GB ({', '.join(f'{k} {v / GB:.1f}' for k, v in largest)})"
            )
        if self.cache_tokens < self.longest:
            lines.append(
                f"an engine's KV cache holds {max(0, int(self.cache_tokens))} tokens; allowed: at least the longest "
                f"sequence, {self.longest}"
            )
        return lines


def plan_memory(job: Job, capacity: float, graphs: GraphPlan | None, *, on_gpu: bool = True) -> MemoryPlan:
    """Memory on devices of ``capacity`` bytes; ``graphs`` are an engine's CUDA graphs.

    ``on_gpu``: there are a CUDA context, NCCL buffers and allocator fragmentation, and the actor is offloaded while
    engines decode. Without, what ranks keep on the host takes the same memory. Raises ConfigError like
    ``stage_memory``.
    """
    own = constants()["memory"]
    engine = engine_memory(job, graphs)
    resident = {"context and NCCL": own["context"] + _groups(job) * own["group"]} if on_gpu else {}
    if engine.graphs:
        resident["CUDA graphs"] = engine.graphs
    loaded = engine.weights + engine.drafter
    if job.engine.cache_tokens is not None:
        cache = job.engine.cache_tokens * engine.cache_token
    else:
        # vLLM takes a fraction of the device, which includes weights and workspace
        cache = job.engine.utilization * capacity - loaded - engine.workspace
    decoding = {"weights": engine.weights, "KV cache": max(0.0, cache), "workspace": engine.workspace}
    if engine.drafter:
        decoding["drafter"] = engine.drafter
    if not on_gpu:
        resident |= {f"engine's {name}": size for name, size in decoding.items()}
        if copy := base_copy(job):
            resident["engine's weights without adapters"] = copy
    phases = []
    for number, stage in enumerate(stage_memory(job)):
        for phase, parts in _phases(job, stage, decoding, loaded, on_gpu).items():
            slack = own["fragmentation"] * sum(parts.values()) if on_gpu and parts != decoding else 0.0
            whole = resident | parts | ({"fragmentation": slack} if slack else {})
            if phase == POLICY_IS_BUILT:
                whole.pop("CUDA graphs", None)
            phases.append(PhaseMemory(phase, number, whole))
    longest = job.prompt_tokens + job.response_tokens
    return MemoryPlan(capacity, tuple(phases), cache / engine.cache_token, longest)


def _groups(job: Job) -> int:
    """Number of communicators with a peer: the actor's by dimension, the world's, the engine's."""
    layout = job.actor.layout
    sizes = (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp, job.world, job.engine.tp)
    return sum(size > 1 for size in sizes)


def _phases(
    job: Job, stage: StageMemory, decoding: dict[str, float], loaded: float, on_gpu: bool
) -> dict[str, dict[str, float]]:
    """Memory of each phase in addition to what is always allocated."""
    actor = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
    trainer = drafter_memory(job)
    # Run.__init__: the policies are built one after the other, then offloaded, and the engine is built alone
    phases: dict[str, dict[str, float]] = {
        POLICY_IS_BUILT: actor | ({"reference": stage.weights} if job.reference else {})
    }
    if on_gpu:
        phases["start, engine"] = dict(decoding)
    phases["rollout"] = dict(decoding) if on_gpu else dict(actor)
    beside = dict(actor)
    trained: dict[str, float] = {}
    if trainer is not None:
        trained = {"drafter's states": trainer.states, "drafter's step": trainer.step}
        if job.spot:
            # trained while the actor is offloaded; then it stays until the engines have received it
            phases["drafter, in the bubble"] = trained if on_gpu else actor | trained
            beside |= {"drafter's states": trainer.states}
    scoring = beside | {"activations": stage.scoring}
    if job.reference:
        scoring |= {"reference": stage.weights}
    phases["log-probs"] = scoring
    phases["update"] = beside | {"activations": stage.activations, "logits": stage.logits}
    if not on_gpu and stage.reduced > stage.activations + stage.logits:
        phases["update"] = beside | {"gradients while they are summed": stage.reduced}
    if trainer is not None and not job.spot:
        phases["drafter"] = actor | trained
    reshard = beside | {"staging": min(job.staging_bytes, 2 * loaded)} | ({"engine": loaded} if on_gpu else {})
    if trainer is not None:
        reshard |= {"drafter's states": trainer.states}
    phases["reshard"] = reshard
    return phases
