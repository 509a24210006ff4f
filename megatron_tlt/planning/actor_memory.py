"""What the actor needs on a device of each pipeline stage: weights, gradients, optimizer, activations; pure.

Activations are counted tensor by tensor: those that autograd keeps of a layer as this project configures it, which
``tests/planning/test_memory.py`` holds against what torch really keeps of Megatron's layers. Shapes: t tokens of a
micro-batch on this rank, H hidden size, Q and K widths of queries and keys, F of the feed-forward layer, each over
tensor parallelism. With sequence parallelism what is H wide is cut as well. The way of counting is that of "Reducing
Activation Recomputation in Large Transformer Models" (2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.planning.job import ActorJob, Job
from megatron_tlt.planning.machine import constants
from megatron_tlt.planning.model_size import Held, ModelSize, held
from megatron_tlt.reshard.actor_layout import stage_layers

# Copies of (chunk, V / TP) in float32 that the log-probs of a chunk of logits work on: logits, softmax, gradient, and
# two products of them (actor/log_probs.py).
_CHUNK_COPIES = 5


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one micro-batch in one layer on one device."""

    kept: float
    """Until the backward pass, without recompute of the whole layer."""
    input: float
    """All that is kept where the whole layer is computed again."""
    working: float
    """Alive only while the layer is worked on: gradients of the feed-forward part."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a device of one pipeline stage."""

    held: Held
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Of all micro-batches in flight, at the peak of an update."""
    logits: float
    """The same, of the last stage's logits and what is worked on beside them."""
    scoring: float
    """Activations and logits of a pass without a backward pass."""
    reduced: float
    """Gradients (or weights) of a chunk of the model, which gloo copies to sum (or gather) them; NCCL does not."""

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def peak_on_cpu(self) -> float:
        """Beyond states: gradients are summed when all activations are gone."""
        return max(self.activations + self.logits, self.reduced)


def layer_activations(model: ModelSize, actor: ActorJob) -> LayerActivations:
    """What one micro-batch of ``actor.max_tokens`` leaves in one layer."""
    layout = actor.layout
    tokens, itemsize = actor.max_tokens / layout.cp, actor.itemsize
    hidden = model.hidden / (layout.tp if layout.sp else 1)
    query, key = model.query / layout.tp, max(model.key / layout.tp, model.head_dim)
    modules = actor.recompute.modules if actor.recompute.granularity == "selective" else ()
    # a norm keeps its input, and its output as the input of what is behind; torch's keeps the normed values as well
    norms = 2.0 * (2 if actor.fused else 3) * hidden
    if "layernorm" in modules:
        norms -= 2 * hidden
    # queries and keys turned by their positions, what they were cut from (values are views of it), attention's output
    attention = query + key + (query + 2 * key) + query + 4 * model.head_dim
    if not actor.fused and "core_attn" not in modules:
        attention += query  # one output per sequence, laid together for the projection behind
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
    """Numbers per token that the feed-forward part keeps at its width, and routed tokens at the hidden size."""
    layout = actor.layout
    # gate and up in one, the gate's activation, up again (Megatron adds an offset to it), their product
    copies = 3 if actor.fused_activation else 5
    if not model.experts:
        return copies * model.ffn / layout.tp, 0.0
    expert_tensor = layout.etp or layout.tp
    # each token goes to top_k experts; of a tensor-parallel rank's part of the tokens, where sequences are cut
    routed = model.top_k * (expert_tensor / layout.tp)
    if layout.ep > 1:
        routed *= constants()["memory"]["expert_imbalance"]
    # behind the product another, with the router's probabilities
    return (copies + 1) * routed * model.ffn / expert_tensor, routed * model.hidden * (2 if layout.ep > 1 else 1)


def stage_memory(job: Job) -> list[StageMemory]:
    """For each pipeline stage.

    Raises:
        ConfigError: the layers cannot be shared out over the stages.
    """
    model, actor = job.model, job.actor
    layout = actor.layout
    stages = stage_layers(layout, model.layers)
    one = layer_activations(model, actor)
    return [
        _stage(job, len(layers), number == 0, number == layout.pp - 1, _in_flight(job, number), one)
        for number, layers in enumerate(stages)
    ]


def micro_batches(job: Job) -> int:
    """Of a data-parallel rank in one optimizer step, with responses of the greatest length; at least one."""
    share = -(-job.responses // job.mini_batches) / job.actor.layout.dp
    per_batch = max(1, job.actor.max_tokens // (job.prompt_tokens + job.response_tokens))
    return max(1, int(-(-share // per_batch)))


def _in_flight(job: Job, stage: int) -> float:
    """Micro-batches whose activations a stage holds at its peak, in units of all of the stage's layers.

    1F1B: as many as there are stages from it on; interleaved, in chunks: Megatron's warm-up and one more (2104.04473).
    """
    layout, count = job.actor.layout, micro_batches(job)
    if not layout.vpp:
        return min(count, layout.pp - stage)
    chunks = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return min(count * layout.vpp, chunks) / layout.vpp


def _stage(job: Job, layers: int, first: bool, last: bool, in_flight: float, one: LayerActivations) -> StageMemory:
    model, actor = job.model, job.actor
    layout = actor.layout
    own = held(model, layout, layers, first, last)
    # the distributed optimizer cuts its state over data and context parallelism, an expert's over what is left of both
    replicas = layout.dp * layout.cp
    expert_replicas = max(1, layout.world // ((layout.etp or layout.tp) * layout.ep * layout.pp))
    optimizer = actor.state_bytes * (own.dense / replicas + own.expert / expert_replicas)
    tokens = actor.max_tokens / layout.cp
    vocabulary = -(-model.vocab // layout.tp)
    # logits and their gradient in float32, or the logits a moment before they are widened
    whole = tokens * vocabulary * 4
    chunk = _CHUNK_COPIES * 4 * min(tokens, actor.chunk_tokens) * vocabulary
    # a weight's gradient is whole for a moment before it is added to the buffer
    widest = max(vocabulary * model.hidden * (first or last), 2 * model.ffn * model.hidden // layout.tp)
    norms = (2 if actor.fused else 3) * one.input
    ends = one.input if layout.pp > 1 else 0.0  # what goes to the next stage is held until its gradient is back
    return StageMemory(
        held=own,
        weights=own.total * actor.itemsize,
        gradients=own.total * actor.gradient_bytes,
        optimizer=optimizer,
        activations=in_flight * (_kept(actor, layers, one) + ends)
        + _transient(actor, layers, one)
        + norms * last
        + widest * actor.itemsize,
        logits=max(2 * whole + chunk - one.working, 0.0) if last else 0.0,
        reduced=own.total * actor.gradient_bytes / (layout.vpp or 1) if replicas > 1 else 0.0,
        scoring=2 * one.input + max(one.kept, (whole * (1.5 if actor.bf16 else 1.0) + chunk) * last),
    )


def _kept(actor: ActorJob, layers: int, one: LayerActivations) -> float:
    """Of one micro-batch in all layers of a stage."""
    recompute = actor.recompute
    if recompute.granularity != "full":
        return layers * one.kept
    if recompute.method == "block":
        again = min(layers, recompute.layers * (actor.layout.vpp or 1))
        return again * one.input + (layers - again) * one.kept
    return -(-layers // recompute.layers) * one.input


def _transient(actor: ActorJob, layers: int, one: LayerActivations) -> float:
    """The layers that are computed again at a time, and what a layer works on."""
    recompute = actor.recompute
    if recompute.granularity != "full":
        return one.working
    again = min(layers, recompute.layers) if recompute.method == "uniform" else 1
    return again * one.kept + one.working
