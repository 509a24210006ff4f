"""Device memory of an engine's rank and of the drafter's trainer; pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.planning.job import Job
from megatron_tlt.planning.machine import constants
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.speculation.graph_pool import GraphPlan

# Queries per chunk in the attention of a further draft (drafter/layers.py).
_QUERY_CHUNK = 512
# Float32 (chunk, V) tensors for a chunk of the drafter's loss: logits, log-probs and gradients of both sides.
_LOSS_COPIES = 6


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one rank of an engine."""

    weights: float
    drafter: float
    """The drafter's head in the engine, in addition to the policy."""
    graphs: float
    workspace: float
    """Activations of the largest step, sampler, tables."""
    cache_token: float
    """KV cache of one token."""


@dataclass(frozen=True)
class DrafterMemory:
    """Bytes of the drafter's trainer on one device."""

    states: float
    """Parameters, moments, and the target's embedding and head that it reads."""
    step: float
    """Gradients, the copy for rollback, and activations."""


def engine_memory(job: Job, graphs: GraphPlan | None) -> EngineMemory:
    """Memory of one rank; with ``graphs`` None the engine captures none."""
    model, engine = job.model, job.engine
    padded = -(-model.vocab // (64 * engine.tp)) * 64 * engine.tp
    attention = model.hidden * 2 * (model.query / engine.tp + max(model.key / engine.tp, model.head_dim))
    layer = attention + model.layer_norms + model.layer_feed_forward / engine.tp
    weights = model.layers * layer + padded / engine.tp * model.hidden * (1 if model.tied else 2) + model.hidden
    # of one layer per token; later layers and other graphs use the tensors again
    sharded = 2 * model.query + 2 * model.key + 3 * model.ffn * max(1, model.top_k)
    activations = engine.itemsize * (4 * model.hidden + sharded / engine.tp)
    # prefill in chunks of batched_tokens through one layer, and float32 logits of every sequence for sampling
    logits = 3 * 4 * engine.max_sequences * (1 + job.draft_tokens) * padded
    workspace = engine.batched_tokens * activations + logits + constants()["memory"]["engine"]
    # keys and values; a KV head shared by several ranks is replicated on each of them
    heads = max(model.groups / engine.tp, 1)
    head = 0 if job.drafter is None else model.draft_head(job.drafter.num_aux_layers, job.drafter.drafted)
    layers = model.layers + (job.drafter is not None)
    return EngineMemory(
        weights=weights * engine.itemsize,
        drafter=head / engine.tp * engine.itemsize,
        graphs=_graphs(graphs, model.layers, activations) if graphs is not None else 0.0,
        workspace=workspace,
        cache_token=2 * layers * heads * model.head_dim * engine.cache_itemsize,
    )


def base_copy(job: Job) -> float:
    """Bytes of the host memory in which a rank of an engine keeps its weights without adapters (``reshard.adapters``).

    0 without adapters: then an engine's weights are on its device alone.
    """
    return engine_memory(job, None).weights if job.adapters else 0.0


def _graphs(plan: GraphPlan, model_layers: int, activations: float) -> float:
    """The V1 runner's piecewise graphs, one for each number of tokens, and the largest one's activations."""
    sizes = {(graph.kind != "target", graph.num_tokens) for graph in plan.graphs}
    layers = sum(1 if of_drafter else model_layers for of_drafter, _ in sizes)
    largest = max((tokens for _, tokens in sizes), default=0)
    return layers * constants()["memory"]["graph_layer"] + largest * activations


def drafter_memory(job: Job) -> DrafterMemory | None:
    """Memory of the trainer: each rank has the whole drafter in float32 and computes in the policy's dtype."""
    drafter, model, itemsize = job.drafter, job.model, job.actor.itemsize
    if drafter is None:
        return None
    parameters = model.draft_head(drafter.num_aux_layers, drafter.drafted)
    shared = model.embeddings * itemsize
    tokens = drafter.max_tokens
    width = model.hidden * (drafter.num_aux_layers + 1 if drafter.eagle3 else 1)
    # one chunk of a head's loss, freed after the chunk
    loss = _LOSS_COPIES * 4 * min(tokens, drafter.chunk_tokens) * model.vocab
    activations = tokens * width * (2 + 4) + drafter.steps * tokens * _draft_layer(model, itemsize)
    activations += (drafter.steps - 1) * _unrolled_attention(job)
    return DrafterMemory(
        states=parameters * 4 * (1 + drafter.moments) + shared, step=parameters * 4 * 2 + activations + loss
    )


def _draft_layer(model: ModelSize, itemsize: int) -> float:
    """Bytes per token that one draft step keeps of its layer: float32 residual stream, the rest in ``itemsize``."""
    stream = 3 * 4 * model.hidden
    return stream + itemsize * (
        8 * model.hidden + 3 * model.query + 2 * model.query + 2 * model.key + 4 * model.dense_ffn
    )


def _unrolled_attention(job: Job) -> float:
    """Bytes that a further draft's attention keeps of a row with a single sequence.

    Each chunk of queries has its own copy of all keys and values up to it, with one head per query head.
    """
    drafter, model = job.drafter, job.model
    assert drafter is not None
    longest = min(drafter.max_tokens, job.prompt_tokens + job.response_tokens)
    rows = drafter.max_tokens / longest
    copies = longest * (longest + _QUERY_CHUNK) / (2 * _QUERY_CHUNK)
    return rows * copies * 2 * model.query * job.actor.itemsize
