"""Time per phase of a step: compute by rooflines, pipeline bubbles, traffic; pure.

FLOPs are counted as in "Efficient Large-Scale Language Model Training on GPU Clusters" (2104.04473): two per weight and
token forward, four backward, two more if a layer is recomputed; causal attention covers half the pairs. If processes
share processor cores, the work of all of them counts: pipeline bubbles cost nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_tlt.planning.actor_memory import StageMemory, layer_activations, owned_weights, stage_memory
from megatron_tlt.planning.engine_memory import drafter_memory, engine_memory
from megatron_tlt.planning.job import Job, Recompute
from megatron_tlt.planning.machine import Machine, constants
from megatron_tlt.planning.memory import MemoryPlan
from megatron_tlt.planning.rollout_time import ResponseLengths, rollout_seconds
from megatron_tlt.reshard.actor_layout import stage_layers

# Each number kept of a layer is written and read once forward, and twice as often backward.
_FORWARD_PASSES, _BACKWARD_PASSES = 2, 4


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by phase; ``offload`` moves the actor to the host and back."""

    rollout: float
    log_probs: float
    update: float
    drafter: float
    reshard: float
    offload: float

    @property
    def total(self) -> float:
        return self.rollout + self.log_probs + self.update + self.drafter + self.reshard + self.offload


@dataclass(frozen=True)
class Workload:
    """A step's sequences: mean prompt and response tokens, and the mean number of tokens attended to."""

    sequences: int
    tokens: float
    attended: float

    @classmethod
    def of(cls, job: Job, lengths: ResponseLengths) -> Workload:
        found = [job.prompt_tokens + length for length in lengths.quantiles(min(job.responses, 512))]
        mean = sum(found) / len(found)
        return cls(job.responses, mean, sum(n * n for n in found) / len(found) / mean)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a micro-batch in one layer on one device, and bytes it moves between devices in a pass."""

    forward: float
    backward: float
    """Excludes recomputation."""
    again: float
    moved_seconds: float
    """For one forward pass through the layer."""


def layer_time(job: Job, machine: Machine, tokens: float, attended: float) -> LayerTime:
    """Time of a layer for a micro-batch of ``tokens`` (before context parallelism) on one device."""
    model, actor, layout = job.model, job.actor, job.actor.layout
    own = tokens / layout.cp
    products = _products(job, own)
    matmul = sum(2 * a * b * c / machine.matmul_rate(min(a, b, c)) for a, b, c in products)
    attention = 2 * own * attended * model.query / layout.tp / machine.attention
    # recomputed values are also written and read
    kept = layer_activations(model, replace(actor, recompute=Recompute())).kept * tokens / actor.max_tokens
    traffic = _FORWARD_PASSES * kept / machine.memory_bandwidth
    forward = matmul + attention + traffic
    backward = 2 * matmul + 2.5 * attention + _BACKWARD_PASSES / _FORWARD_PASSES * traffic
    again = 0.0
    if actor.recompute.granularity == "full":
        layers = max(len(stage) for stage in stage_layers(layout, model.layers))
        all_of_them = actor.recompute.method != "block"
        again = forward if all_of_them else forward * min(1.0, actor.recompute.layers * (layout.vpp or 1) / layers)
    elif actor.recompute.granularity == "selective":
        again = attention if "core_attn" in actor.recompute.modules else 0.0
        again += (matmul + traffic) / 2 if {"mlp", "moe"} & set(actor.recompute.modules) else 0.0
    return LayerTime(forward, backward, again, _layer_traffic(job, machine, own))


def _products(job: Job, tokens: float) -> list[tuple[float, float, float]]:
    """The matrix products of a layer on one device, as (rows, inner, columns)."""
    model, layout = job.model, job.actor.layout
    tp = layout.tp
    products = [
        (tokens, model.hidden, (model.query + 2 * model.key) / tp),
        (tokens, model.query / tp, model.hidden),
    ]
    rows, width = tokens, model.ffn / tp
    if model.experts:
        expert_tensor = layout.etp or tp
        rows = tokens * model.top_k * expert_tensor / tp
        width = model.ffn / expert_tensor
        # one product for each of its experts
        own = model.experts / layout.ep
        each = [(rows / own, model.hidden, 2 * width), (rows / own, width, model.hidden)]
        return products + each * int(own)
    return [*products, (rows, model.hidden, 2 * width), (rows, width, model.hidden)]


def _layer_traffic(job: Job, machine: Machine, tokens: float) -> float:
    """Seconds of a forward pass's collectives in a layer: two over TP (with sequence parallelism a gather and a scatter
    each), keys and values over CP, two over EP."""
    model, actor, layout = job.model, job.actor, job.actor.layout
    size, per_node = actor.itemsize, job.devices_per_node
    rate = machine.link(layout.tp, per_node)
    seconds = 0.0
    if layout.tp > 1:
        parts = 1 + _scatters(machine) if layout.sp else 2
        amount = parts * (layout.tp - 1) / layout.tp * tokens * model.hidden * size
        seconds += 2 * (amount / rate + (2 if layout.sp else 1) * machine.latency(layout.tp))
    if layout.cp > 1:
        rate = machine.link(layout.tp * layout.cp, per_node)
        amount = 2 * model.key / layout.tp * tokens * (layout.cp - 1) * size
        seconds += amount / rate + machine.latency(layout.cp)
    if layout.ep > 1:
        expert_tensor = layout.etp or layout.tp
        rate = machine.link(expert_tensor * layout.ep, per_node)
        amount = tokens * model.top_k * expert_tensor / layout.tp / expert_tensor
        amount *= model.hidden * size * (layout.ep - 1) / layout.ep
        seconds += 2 * (amount / rate + machine.latency(layout.ep))
    return seconds


def _scatters(machine: Machine) -> int:
    """Parts of a tensor that a reduce-scatter moves: gloo reduces the whole tensor on every rank."""
    return 2 if machine.is_cpu else 1


def pass_seconds(job: Job, machine: Machine, work: Workload, sequences: float, *, forward_only: bool) -> float:
    """Seconds for ``sequences`` to pass through the model, over all data-parallel ranks together.

    The slowest stage limits the pipeline; interleaving divides the bubble (2104.04473, section 2.2). In training, each
    logical shard has one.
    """
    model, actor, layout = job.model, job.actor, job.actor.layout
    tokens = sequences / layout.dp * work.tokens
    room = max(1.0, actor.max_tokens * constants()["workload"]["packing"] // work.tokens) * work.tokens
    flushes = 1 if forward_only else actor.shards_of_rank
    count = max(flushes, round(tokens / room + 0.499))
    each = tokens / count
    one = layer_time(job, machine, each, work.attended)
    # collectives run again backward for the gradients, and once more if the layer is recomputed
    per_layer = one.forward + one.moved_seconds
    if not forward_only:
        # sequence parallelism gathers a product's input again for its weights' gradient
        per_layer += one.backward + (1.5 if layout.sp else 1) * one.moved_seconds + one.again
        per_layer += one.moved_seconds if actor.recompute.granularity == "full" else 0.0
    own = each / layout.cp
    vocabulary = model.vocab / layout.tp
    head = 2 * own * model.hidden * vocabulary / machine.matmul_rate(min(own, model.hidden, vocabulary))
    # approximate number of passes over the logits for log-probs, entropy and their gradient
    passes = 4 if forward_only else 10
    head = head * (1 if forward_only else 3) + passes * 4 * own * vocabulary / machine.memory_bandwidth
    stages = [len(layers) * per_layer for layers in stage_layers(layout, model.layers)]
    stages[-1] += head
    if not forward_only:
        stages = [
            seconds + _accumulation(job, machine, stage)
            for seconds, stage in zip(stages, stage_memory(job), strict=True)
        ]
    between = own * model.hidden * actor.itemsize / (layout.tp if layout.sp else 1)
    link = machine.link(job.world, job.devices_per_node)
    hop = (1 if forward_only else 2) * between / link if layout.pp > 1 else 0.0
    if machine.is_cpu:
        # all ranks' work over the cores; while one rank waits, another computes
        busy = count * (sum(stages) / layout.pp + hop * (layout.vpp or 1))
        return busy * machine.sharing(job.world)
    return (count + flushes * (layout.pp - 1) / (layout.vpp or 1)) * (max(stages) + hop * (layout.vpp or 1))


def _accumulation(job: Job, machine: Machine, stage: StageMemory) -> float:
    """Seconds to accumulate a micro-batch's gradients; unless fused, they are written first and read again."""
    actor = job.actor
    touched = 2 * actor.gradient_bytes + (0 if actor.fused else 2 * actor.itemsize)
    return stage.held.total * actor.trained * touched / machine.memory_bandwidth


def optimizer_seconds(job: Job, machine: Machine) -> float:
    """Reduces gradients, steps and gathers weights, clears gradients; once."""
    actor, layout = job.actor, job.actor.layout
    stages = stage_memory(job)
    weights = max(stage.held.total for stage in stages) * actor.trained
    replicas = layout.dp * layout.cp
    passes = constants()["time"]["fused_step_passes" if actor.fused else "step_passes"]
    if actor.optimizer.owned != "slices":
        return _whole_tensor_seconds(job, machine, weights, passes) * machine.sharing(job.world)
    stepped = weights * (actor.optimizer.state_bytes + actor.gradient_bytes) * passes / replicas
    seconds = (stepped + weights * (actor.gradient_bytes + actor.itemsize)) / machine.memory_bandwidth
    if replicas > 1:
        rate = machine.link(layout.tp * replicas, job.devices_per_node)
        amount = weights * (_scatters(machine) * actor.gradient_bytes + actor.itemsize) * (replicas - 1) / replicas
        seconds += amount / rate * (1.0 - machine.overlap if actor.overlap else 1.0)
    return seconds * machine.sharing(job.world)


def _whole_tensor_seconds(job: Job, machine: Machine, weights: float, passes: float) -> float:
    """As above: gradients are reduced on every rank and travel to the owners, and weights return.

    ``weights``: those that a rank holds. A learned optimizer's network is more than the memory traffic counted here.
    """
    actor, layout = job.actor, job.actor.layout
    owned, replicas = owned_weights(job), layout.dp * layout.cp
    seconds = owned * (actor.optimizer.state_bytes + actor.gradient_bytes) * passes / machine.memory_bandwidth
    seconds += weights * (actor.gradient_bytes + actor.itemsize) / machine.memory_bandwidth
    if replicas > 1:
        rate = machine.link(layout.tp * replicas, job.devices_per_node)
        amount = weights * 2 * actor.gradient_bytes * (replicas - 1) / replicas
        seconds += amount / rate * (1.0 - machine.overlap if actor.overlap else 1.0)
    if layout.world > 1:
        rate = machine.link(layout.world, job.devices_per_node)
        gathered = owned * actor.gradient_bytes
        # one owner sends each rank its weights; many owners send and receive at the same time
        sent = weights * actor.itemsize * (layout.world if actor.optimizer.owned == "all" else 1)
        seconds += (gathered + sent) / rate
    return seconds


def update_seconds(job: Job, machine: Machine, work: Workload) -> float:
    """Seconds of all mini-batches of a step."""
    one = pass_seconds(job, machine, work, work.sequences / job.mini_batches, forward_only=False)
    return job.mini_batches * (one + optimizer_seconds(job, machine))


def step_time(job: Job, machine: Machine, memory: MemoryPlan, mean_response: float, reshard: float | None) -> StepTime:
    """Seconds of a whole step; ``reshard`` of None takes an engine's weights over the slower link.

    ``memory`` is the same job's memory plan; ``mean_response`` is in tokens.
    """
    lengths = ResponseLengths.of(job, mean_response)
    work = Workload.of(job, lengths)
    engine = engine_memory(job, None)
    if reshard is None:
        reshard = engine.weights / machine.link(job.world, job.devices_per_node)
    scored = pass_seconds(job, machine, work, work.sequences, forward_only=True)
    return StepTime(
        rollout=rollout_seconds(job, machine, engine, memory.cache_tokens, lengths),
        log_probs=scored * (2 if job.reference else 1),
        update=update_seconds(job, machine, work),
        drafter=_drafter_seconds(job, machine, work),
        reshard=reshard,
        offload=offload_seconds(job, machine),
    )


def offload_seconds(job: Job, machine: Machine) -> float:
    """Seconds to move the actor's weights and optimizer to the host and back."""
    if machine.is_cpu:
        return 0.0
    return 2 * max(stage.weights + stage.optimizer for stage in stage_memory(job)) / machine.host_link


def _drafter_seconds(job: Job, machine: Machine, work: Workload) -> float:
    """Seconds of a training session after the update; in the bubble it adds nothing to the step."""
    drafter, memory = job.drafter, drafter_memory(job)
    if drafter is None or memory is None or job.spot:
        return 0.0
    model = job.model
    # per draft the layer forward and backward; the head forward, recomputed, and backward, and the target's forward
    drafted = model.hidden * (drafter.drafted or model.vocab)
    per_token = drafter.steps * (6 * model.draft_layer(drafter.num_aux_layers) + 2 * model.vocabulary + 8 * drafted)
    tokens = drafter.session_steps * drafter.entries_per_step * work.tokens
    rate = machine.matmul_rate(min(drafter.chunk_tokens, model.hidden))
    return tokens * per_token / rate * machine.sharing(job.world)
