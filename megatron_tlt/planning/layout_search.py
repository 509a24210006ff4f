"""The fastest layout that fits, for equal devices; pure.

The space: tensor (within a node), pipeline (also interleaved), context and expert parallelism, sharded or whole
experts, tokens of a micro-batch, recompute, and ranks of an engine; data parallelism follows. A step's time is the sum
of an actor part and an engine part, which only memory couples. So the search goes through the two in turn and drops,
without losing the best:

- a layout whose weights, gradients and optimizer alone do not fit;
- recompute that is slower than one that already fits with every engine;
- a choice that cannot be faster than the best found so far, even with the fastest engine and without recompute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from megatron_tlt.config.layouts import Layout, divisors, problems, tensor_problems
from megatron_tlt.planning.actor_memory import stage_memory
from megatron_tlt.planning.cost import StepTime, Workload, offload_seconds, pass_seconds, step_time, update_seconds
from megatron_tlt.planning.job import Job, Recompute
from megatron_tlt.planning.machine import Machine
from megatron_tlt.planning.memory import MemoryPlan
from megatron_tlt.planning.rollout_time import ResponseLengths

RECOMPUTES = (
    Recompute(),
    Recompute("selective", modules=("mlp",)),
    Recompute("selective", modules=("moe",)),
    Recompute("full"),
)
_CONTEXTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class RankedLayout:
    """A choice that fits, with its memory and time."""

    job: Job
    seconds: StepTime
    margin: float

    @property
    def total(self) -> float:
        return self.seconds.total


@dataclass
class SearchResult:
    """The best choices, the fastest first, and the size of the search."""

    best: list[RankedLayout]
    choices: int = 0
    """Evaluated pairs of an actor part and an engine part, of all pairs in the space."""
    layouts: int = 0
    """Number of actor layouts that the libraries accept."""


def actor_layouts(job: Job) -> Iterator[Layout]:
    """Every layout of the job's world size that the model and the libraries allow."""
    world, shape = job.world, job.model.shape
    most = job.responses // job.mini_batches
    for tp in divisors(job.devices_per_node):
        for pp in divisors(world):
            chunks = [None, *range(2, shape.layers // pp + 1)] if pp > 1 else [None]
            for cp in _CONTEXTS:
                if world % (tp * pp * cp) or world // (tp * pp * cp) > most:
                    continue
                for ep, etp in _expert_sizes(job, tp, pp):
                    for vpp in chunks:
                        layout = Layout(world, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, sp=tp > 1)
                        if not problems(layout, shape):
                            yield layout


def _expert_sizes(job: Job, tp: int, pp: int) -> list[tuple[int, int | None]]:
    if not job.model.experts:
        return [(1, None)]
    return [(ep, etp) for ep in divisors(job.world // pp) for etp in ((None, 1) if tp > 1 else (None,))]


def engine_sizes(job: Job) -> list[int]:
    """Every number of ranks per engine that vLLM and the prompts of a step allow."""
    shape, spread = job.model.shape, job.engine.spread_experts
    return [
        tp
        for tp in divisors(job.devices_per_node)
        if not any(tensor_problems("", tp, shape))
        and (not shape.moe_ffn or shape.moe_ffn % tp == 0 or spread)
        and job.world // tp <= job.prompts
    ]


def micro_batch_tokens(job: Job) -> list[int]:
    """Tokens of one, two and four of the longest sequences, and the config's value."""
    longest = job.prompt_tokens + job.response_tokens
    return sorted({longest, 2 * longest, 4 * longest, max(longest, job.actor.max_tokens)})


def recomputes(job: Job) -> list[Recompute]:
    """The recompute settings that differ for the model."""
    skipped = "mlp" if job.model.experts else "moe"
    return [one for one in RECOMPUTES if one.granularity != "selective" or skipped not in one.modules]


def search(
    job: Job,
    machine: Machine,
    plan: Callable[[Job], MemoryPlan],
    mean_response: float,
    *,
    keep: int = 5,
    prune: bool = True,
) -> SearchResult:
    """The ``keep`` fastest choices that fit; a step's responses have ``mean_response`` tokens on average.

    ``job``'s own layout and sizes are one choice among others; ``plan`` computes a choice's memory. Without ``prune``
    every choice is evaluated: it finds the same best one, and only then are the others guaranteed to be the next best.
    """
    return _Search(job, machine, plan, mean_response, keep, prune).run()


class _Search:
    def __init__(
        self, job: Job, machine: Machine, plan: Callable[[Job], MemoryPlan], mean: float, keep: int, prune: bool
    ) -> None:
        self._job, self._machine, self._plan, self._mean = job, machine, plan, mean
        self._keep, self._prune = keep, prune
        self._work = Workload.of(job, ResponseLengths.of(job, mean))
        self._found: list[tuple[float, int, RankedLayout]] = []  # a heap, the slowest first
        self._order = count()
        self._result = SearchResult([])

    def run(self) -> SearchResult:
        engines = sorted(self._engines(), key=lambda entry: entry[0])
        layouts = list(actor_layouts(self._job))
        self._result.layouts = len(layouts)
        fastest = engines[0][0] if engines else 0.0
        for layout in layouts:
            bare = replace(self._job, actor=replace(self._job.actor, layout=layout))
            if self._prune and max(stage.states for stage in stage_memory(bare)) > self._plan(bare).capacity:
                continue  # not even the states fit
            for tokens in micro_batch_tokens(self._job):
                self._try_tokens(replace(bare, actor=replace(bare.actor, max_tokens=tokens)), engines, fastest)
        self._result.best = [found for _, _, found in sorted(self._found, key=lambda e: (-e[0], e[1]))]
        return self._result

    def _engines(self) -> Iterator[tuple[float, int, StepTime]]:
        """Seconds that depend on the engine alone, by its ranks."""
        for tp in engine_sizes(self._job):
            job = replace(self._job, engine=replace(self._job.engine, tp=tp))
            seconds = step_time(job, self._machine, self._plan(job), self._mean, None)
            yield seconds.rollout + seconds.reshard + seconds.drafter, tp, seconds

    def _worst(self) -> float:
        """Time that a further choice must beat."""
        return -self._found[0][0] if len(self._found) == self._keep else float("inf")

    def _try_tokens(self, job: Job, engines: list[tuple[float, int, StepTime]], fastest: float) -> None:
        """Tries one layout and micro-batch size with every recompute and engine."""
        for recompute in recomputes(job):
            own = replace(job, actor=replace(job.actor, recompute=recompute))
            seconds = actor_seconds(own, self._machine, self._work)
            if self._prune and sum(seconds) + fastest >= self._worst():
                # the first has no recompute, which only adds time
                return
            fitted = [self._try(own, seconds, engine) for engine in engines]
            if self._prune and all(fitted):
                return

    def _try(self, job: Job, actor: tuple[float, float, float], engine: tuple[float, int, StepTime]) -> bool:
        rest, tp, decoding = engine
        if self._prune and sum(actor) + rest >= self._worst():
            return True  # even if it does not fit: no slower recompute with this engine can be better
        self._result.choices += 1
        whole = replace(job, engine=replace(job.engine, tp=tp))
        memory = self._plan(whole)
        if not memory.fits:
            return False
        seconds = replace(decoding, log_probs=actor[0], update=actor[1], offload=actor[2])
        entry = (-seconds.total, next(self._order), RankedLayout(whole, seconds, memory.margin))
        if len(self._found) < self._keep:
            heapq.heappush(self._found, entry)
        else:
            heapq.heappushpop(self._found, entry)
        return True


def actor_seconds(job: Job, machine: Machine, work: Workload) -> tuple[float, float, float]:
    """Seconds that depend on the actor part: log-probs, update and offload."""
    scored = pass_seconds(job, machine, work, work.sequences, forward_only=True) * (2 if job.reference else 1)
    return scored, update_seconds(job, machine, work), offload_seconds(job, machine)


def overrides_of(found: Job) -> dict[str, Any]:
    """A choice as keys of a launch config, ``actor`` and ``rollout``."""
    layout, actor = found.actor.layout, found.actor
    recompute = actor.recompute
    megatron: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "recompute_granularity": recompute.granularity,
        "recompute_method": "uniform" if recompute.granularity == "full" else None,
        "recompute_num_layers": recompute.layers if recompute.granularity == "full" else None,
        "recompute_modules": list(recompute.modules) if recompute.granularity == "selective" else None,
    }
    if found.model.experts:
        megatron |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.etp}
    return {
        "actor": {"megatron": megatron, "max_tokens_per_micro_batch": actor.max_tokens},
        "rollout": {"tensor_parallel_size": found.engine.tp},
    }
