"""Actor memory per device of each pipeline stage: weights, gradients, optimizer, activations; pure.

Activations are counted tensor by tensor: those that autograd keeps of a layer as this project configures it.
``tests/planning/test_memory.py`` compares them with what torch keeps of Megatron's layers. Shapes: t tokens of a
micro-batch on this rank, H hidden size, Q and K widths of queries and keys, F of the feed-forward layer, each over
tensor parallelism. With sequence parallelism, tensors of width H are sharded too. The method follows "Reducing
Activation Recomputation in Large Transformer Models" (2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.planning.job import ActorJob, Job
from megatron_tlt.planning.machine import constants
from megatron_tlt.planning.model_size import Held, ModelSize, held
from megatron_tlt.reshard.actor_layout import stage_layers

# Float32 copies of (chunk, V / TP) for the log-probs of a chunk of logits: logits, softmax, gradient, and two products
# of them (actor/log_probs.py).
_CHUNK_COPIES = 5


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one micro-batch in one layer on one device."""

    kept: float
    """Kept until the backward pass, without recompute of the whole layer."""
    input: float
    """Kept if the whole layer is recomputed."""
    working: float
    """Alive only while the layer is computed: gradients of the feed-forward part."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a pipeline stage."""

    held: Held
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations of all micro-batches in flight, at the peak of an update."""
    logits: float
    """As above, for the last stage's logits and their temporaries."""
    scoring: float
    """Activations and logits of a forward pass without backward."""
    reduced: float
    """Copies of one chunk's gradients (or weights) that gloo makes to reduce (or gather) them; NCCL makes none."""

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer


def layer_activations(model: ModelSize, actor: ActorJob) -> LayerActivations:
    """Activations of one micro-batch of ``actor.max_tokens`` in one layer."""
    layout = actor.layout
    tokens, itemsize = actor.max_tokens / layout.cp, actor.itemsize
    hidden = model.hidden / (layout.tp if layout.sp else 1)
    query, key = model.query / layout.tp, max(model.key / layout.tp, model.head_dim)
    modules = actor.recompute.modules if actor.recompute.granularity == "selective" else ()
    # a norm keeps its input and its output (the next layer's input); torch's norm also keeps the normalized values
    norms = 2.0 * (2 if actor.fused else 3) * hidden
    if "layernorm" in modules:
        norms -= 2 * hidden
    # rotated queries and keys, the tensor they were split from (values are views of it), attention's output
    attention = query + key + (query + 2 * key) + query + 4 * model.head_dim
    if not actor.fused and "core_attn" not in modules:
        attention += query  # one output per sequence, concatenated for the projection
    if model.qk_norm:
        attention += query if actor.fused else 2 * query + key
    feed_forward, routed_hidden = _feed_forward(model, actor)
    working = 4.0 * feed_forward / 5 + 2 * hidden
    if ("mlp" in modules and not model.experts) or ("moe" in modules and model.experts):
        working += feed_forward + routed_hidden
        feed_forward = routed_hidden = 0.0
    elif "moe_act" in modules and model.experts:
        feed_forward *= 3 / 5
    kept = norms + attention + feed_forward + routed_hidden
    return LayerActivations(tokens * kept * itemsize, tokens * hidden * itemsize, tokens * working * itemsize)


def _feed_forward(model: ModelSize, actor: ActorJob) -> tuple[float, float]:
    """Numbers per token kept by the feed-forward part at its width, and routed tokens at the hidden size."""
    layout = actor.layout
    # gate and up in one tensor, the gate's activation, up again (Megatron adds an offset to it), their product
    copies = 3 if actor.fused_activation else 5
    if not model.experts:
        return copies * model.ffn / layout.tp, 0.0
    expert_tensor = layout.etp or layout.tp
    # each token goes to top_k experts; with sequence parallelism, a tensor-parallel rank has its part of the tokens
    routed = model.top_k * (expert_tensor / layout.tp)
    if layout.ep > 1:
        routed *= constants()["memory"]["expert_imbalance"]
    # after the product a second one, with the router's probabilities
    return (copies + 1) * routed * model.ffn / expert_tensor, routed * model.hidden * (2 if layout.ep > 1 else 1)


def stage_memory(job: Job) -> list[StageMemory]:
    """Memory of each pipeline stage; raises ConfigError if the layers cannot be divided among the stages."""
    one = layer_activations(job.model, job.actor)
    stages = stage_layers(job.actor.layout, job.model.layers)
    return [_stage(job, number, len(layers), one) for number, layers in enumerate(stages)]


def micro_batches(job: Job) -> int:
    """Micro-batches of a data-parallel rank per optimizer step, for responses of maximum length; at least one."""
    share = -(-job.responses // job.mini_batches) / job.actor.layout.dp
    per_batch = max(1, job.actor.max_tokens // (job.prompt_tokens + job.response_tokens))
    return max(1, int(-(-share // per_batch)))


def _in_flight(job: Job, stage: int) -> float:
    """Micro-batches whose activations a stage holds at its peak, in units of all of the stage's layers.

    1F1B: one per stage from this one to the last. Interleaved, in chunks: Megatron's warm-up plus one (2104.04473).
    """
    layout, count = job.actor.layout, micro_batches(job)
    if not layout.vpp:
        return min(count, layout.pp - stage)
    chunks = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return min(count * layout.vpp, chunks) / layout.vpp


def _optimizer(job: Job, own: Held, first: bool) -> float:
    layout, optimizer = job.actor.layout, job.actor.optimizer
    if optimizer.owned == "slices":
        # over data and context parallelism; experts over what EP leaves of both
        expert_replicas = max(1, layout.world // ((layout.etp or layout.tp) * layout.ep * layout.pp))
        weights = own.dense / (layout.dp * layout.cp) + own.expert / expert_replicas
        return job.actor.trained * optimizer.state_bytes * weights
    if optimizer.owned == "all" and not first:
        return 0.0
    actor, owned = job.actor, owned_weights(job)
    step = max(optimizer.step_bytes * actor.largest_stepped, optimizer.split_bytes * actor.largest_tensor)
    return optimizer.state_bytes * owned + step


def owned_weights(job: Job) -> float:
    """Weights that the fullest rank owns where whole tensors are stepped."""
    trained = job.actor.trained * job.model.parameters
    if job.actor.optimizer.owned == "all":
        return trained
    # the longest tensor first: its owner has more than the average only if it alone is more
    return max(trained / job.actor.layout.world, job.actor.largest_tensor)


def _stage(job: Job, number: int, layers: int, one: LayerActivations) -> StageMemory:
    model, actor = job.model, job.actor
    layout = actor.layout
    first, last = number == 0, number == layout.pp - 1
    own = held(model, layout, layers, first, last)
    replicas = layout.dp * layout.cp
    optimizer = _optimizer(job, own, first)
    tokens = actor.max_tokens / layout.cp
    vocabulary = -(-model.vocab // layout.tp)
    # logits and their gradient in float32, or the logits briefly in both dtypes
    whole = tokens * vocabulary * 4
    chunk = _CHUNK_COPIES * 4 * min(tokens, actor.chunk_tokens) * vocabulary
    # a weight's gradient exists in full before it is added to the buffer
    widest = max(vocabulary * model.hidden * (first or last), 2 * model.ffn * model.hidden // layout.tp)
    norms = (2 if actor.fused else 3) * one.input
    ends = one.input if layout.pp > 1 else 0.0  # the output to the next stage is kept until its gradient returns
    return StageMemory(
        held=own,
        weights=own.total * (1.0 if actor.trained == 1.0 else 1.0 + actor.trained) * actor.itemsize,
        # sums of logical shards wait for their neighbour (actor.gradient_tree)
        gradients=own.total * actor.trained * actor.gradient_bytes * actor.shards_of_rank.bit_length(),
        optimizer=optimizer,
        activations=_in_flight(job, number) * (_kept(actor, layers, one) + ends)
        + _transient(actor, layers, one)
        + norms * last
        + widest * actor.itemsize,
        logits=max(2 * whole + chunk - one.working, 0.0) if last else 0.0,
        reduced=own.total * actor.trained * actor.gradient_bytes / (layout.vpp or 1) if replicas > 1 else 0.0,
        scoring=2 * one.input + max(one.kept, (whole * (1.5 if actor.bf16 else 1.0) + chunk) * last),
    )


def _kept(actor: ActorJob, layers: int, one: LayerActivations) -> float:
    """Bytes that one micro-batch keeps in all layers of a stage."""
    recompute = actor.recompute
    if recompute.granularity != "full":
        return layers * one.kept
    if recompute.method == "block":
        again = min(layers, recompute.layers * (actor.layout.vpp or 1))
        return again * one.input + (layers - again) * one.kept
    return -(-layers // recompute.layers) * one.input


def _transient(actor: ActorJob, layers: int, one: LayerActivations) -> float:
    """Layers that are recomputed at a time, and a layer's temporaries."""
    recompute = actor.recompute
    if recompute.granularity != "full":
        return one.working
    again = min(layers, recompute.layers) if recompute.method == "uniform" else 1
    return again * one.kept + one.working
