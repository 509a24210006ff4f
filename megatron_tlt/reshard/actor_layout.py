"""The weights that every rank of a Megatron layout holds, computed without Megatron or a process group; pure.

The rules are Megatron-Core 0.16's own: ranks in its order tp-cp-ep-dp-pp (``parallel_state.RankGenerator``), layers as
``transformer_block.get_num_layers_to_build`` and ``transformer_layer.get_transformer_layer_offset`` place them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from megatron_tlt.config.layouts import Layout, problems
from megatron_tlt.errors import ConfigError
from megatron_tlt.reshard.spans import ShardMap, Span

if TYPE_CHECKING:
    from megatron_tlt.models.weight_map import WeightMap

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def actor_side(weights: WeightMap, layout: Layout) -> ShardMap:
    """The spans that each rank of ``layout`` holds, including replicas and copies of a tied embedding.

    Raises:
        ConfigError: the layout does not fit the world or the model's layers; see also :func:`stage_layers`.
    """
    if found := problems(layout, None):
        raise ConfigError("\n".join(found))
    stages = _parameters_by_stage(weights, layout)
    expert_size = layout.etp or layout.tp

    @cache
    def held(stage: int, tensor: int, expert_tensor: int, expert: int) -> tuple[Span, ...]:
        """Of a rank, by its index in each group that determines its weights."""
        return tuple(_held(weights, layout, stages[stage], tensor, expert_tensor, expert))

    # Context and data parallelism only add replicas.
    per_stage = layout.world // layout.pp
    ranks = range(layout.world)
    spans = (held(r // per_stage, r % layout.tp, r % expert_size, r // expert_size % layout.ep) for r in ranks)
    return ShardMap(str(layout), tuple(spans))


def stage_layers(layout: Layout, layers: int) -> tuple[tuple[int, ...], ...]:
    """The layers of each pipeline stage, counted over the whole model; an interleaved stage has several ranges.

    Raises:
        ConfigError: the layers cannot be divided among the stages, or the config places them by hand.
    """
    if layout.by_hand:
        raise ConfigError(
            "actor.megatron.pipeline_model_parallel_layout: found a layout given by hand, whose weights cannot be "
            "placed without Megatron; allowed: null, or num_layers_in_first_pipeline_stage and its like"
        )
    chunks, last = layout.vpp or 1, layout.pp - 1
    given = {stage: n for stage, n in ((0, layout.first), (last, layout.last)) if n is not None}
    free = layout.pp - len(given)
    even = (layers + layout.extra - sum(given.values())) // free if free else 0
    stages: list[list[int]] = [[] for _ in range(layout.pp)]
    at = 0
    # The first chunks of all stages come first, then the second chunks.
    for chunk in range(chunks):
        for stage in range(layout.pp):
            count = given.get(stage, even) // chunks
            count -= layout.counts_embedding and (chunk, stage) == (0, 0)
            count -= layout.counts_loss and (chunk, stage) == (chunks - 1, last)
            stages[stage] += range(at, at + count)
            at += max(0, count)
    if at != layers:
        raise ConfigError(f"actor.megatron: layout {layout} places {at} layers; the model has {layers}")
    return tuple(map(tuple, stages))


def _parameters_by_stage(weights: WeightMap, layout: Layout) -> list[list[str]]:
    """Megatron's parameters on each pipeline stage, in whole-model names."""
    of_layer: Mapping[int, list[str]] = defaultdict(list)
    for parameter in weights.parameters:
        if parameter.startswith("decoder.layers."):
            of_layer[int(parameter.split(".", 3)[2])].append(parameter)
    stages = [
        [parameter for layer in layers for parameter in of_layer[layer]]
        for layers in stage_layers(layout, weights.num_layers)
    ]
    stages[0].insert(0, _EMBEDDING)
    stages[-1].append("decoder.final_layernorm.weight")
    # The last stage has a copy of a tied embedding, unless it is also the first one.
    if layout.pp > 1 or not weights.tied:
        stages[-1].append(_OUTPUT)
    return stages


def _held(
    weights: WeightMap, layout: Layout, parameters: list[str], tensor: int, expert_tensor: int, expert: int
) -> Iterator[Span]:
    share = weights.num_experts // layout.ep
    own = range(expert * share, (expert + 1) * share)
    for parameter in parameters:
        rank, size = tensor, layout.tp
        if weights.is_expert(parameter):
            if int(parameter.split(".experts.")[1].split(".")[0]) not in own:
                continue
            rank, size = expert_tensor, layout.etp or layout.tp
        for piece in weights.pieces(parameter, rank, size):
            yield Span(piece.name, piece.start, piece.length)
