"""Rollout time from a roofline of each engine step, with responses that end at different times; pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp
from statistics import NormalDist

from megatron_tlt.planning.engine_memory import EngineMemory
from megatron_tlt.planning.job import Job
from megatron_tlt.planning.machine import Machine, constants

# Tokens during which a batch's contexts are treated as one length.
_LONGEST_STRIDE = 256


@dataclass(frozen=True)
class ResponseLengths:
    """Response lengths of a step: a log-normal distribution truncated at the longest allowed; tokens."""

    mean: float
    longest: int
    spread: float

    @classmethod
    def of(cls, job: Job, mean: float) -> ResponseLengths:
        return cls(mean, job.response_tokens, constants()["workload"]["spread"])

    @cache  # noqa: B019 - plans have few distributions
    def quantiles(self, count: int) -> tuple[float, ...]:
        """``count`` lengths at equal steps of probability, ascending; their mean is ``mean`` if the limit allows it."""
        law = NormalDist(0.0, self.spread)
        shape = [exp(law.inv_cdf((i + 0.5) / count)) for i in range(count)]
        low, high = 0.0, float(self.longest) * 100
        for _ in range(60):  # the scale at which the truncated distribution has the mean
            scale = (low + high) / 2
            total = sum(min(self.longest, scale * x) for x in shape)
            low, high = (scale, high) if total < self.mean * count else (low, scale)
        return tuple(max(1.0, min(self.longest, low * x)) for x in shape)


def decode_step_seconds(
    job: Job, machine: Machine, engine: EngineMemory, batch: float, context: float, between_nodes: bool
) -> float:
    """Seconds of one engine step of ``batch`` requests with ``context`` tokens each, without drafts.

    Weights (only of chosen experts) and caches are read once while products are computed, so the larger time counts.
    `planning.simulation.engine` adds the two, as drafts need the cost of each further token.
    """
    model, own = job.model, job.engine
    read = model.touched(batch) / own.tp * own.itemsize + batch * context * engine.cache_token
    work = 2 * model.multiplied / own.tp * batch
    seconds = max(read / machine.memory_bandwidth, work / machine.matmul_rate(max(1.0, batch)))
    if own.tp > 1:
        link = machine.network if between_nodes else machine.node_link
        amount = batch * model.hidden * own.itemsize * 2 * (own.tp - 1) / own.tp
        seconds += 2 * model.layers * (machine.latency(own.tp) + amount / link)
    return seconds * machine.sharing(job.world) + machine.decode_overhead


def rollout_seconds(
    job: Job, machine: Machine, engine: EngineMemory, cache_tokens: float, lengths: ResponseLengths
) -> float:
    """Seconds in which an engine decodes its share of a step's responses; those that do not fit wait.

    All engines get equal distributions of lengths, so this is the longest engine's time; speculation is not included.
    """
    count = max(1, -(-job.responses // job.engines))
    lengths_in_order = lengths.quantiles(count)
    # lengths are unknown beforehand: the order of starts is independent of them
    stride_of_starts = 7919 if count % 7919 else 1
    waiting = [lengths_in_order[(i * stride_of_starts) % count] for i in range(count)]
    between_nodes = job.engine.tp > job.devices_per_node
    running: list[list[float]] = []
    prompts = 2 * job.model.multiplied / job.engine.tp * job.prompt_tokens * count
    clock = prompts / machine.matmul_rate(job.engine.batched_tokens) * machine.sharing(job.world)
    held = 0.0
    # vLLM admits what fits now and preempts some later: on average, the batch fits at its mean length
    most = max(1, min(job.engine.max_sequences, int(cache_tokens / (job.prompt_tokens + lengths.mean))))
    while waiting or running:
        while waiting and len(running) < most:
            running.append([waiting.pop(), 0.0])
            held += job.prompt_tokens
        stride = min(min(left for left, _ in running), _LONGEST_STRIDE)
        context = held / len(running) + stride / 2
        clock += stride * decode_step_seconds(job, machine, engine, len(running), context, between_nodes)
        still = []
        for left, done in running:
            if left - stride > 1e-9:
                still.append([left - stride, done + stride])
                held += stride
            else:
                held -= job.prompt_tokens + done
        running = still
    return clock
