"""What captured graphs cost in memory: a model with two constants, fitted on published figures.

The constants, the figures and what had to be assumed about them stand in ``graph_memory.json``. The constants were
fitted on two figures, one strategy alone and bucketed; naive is predicted, by assumptions that were made knowing all
three. So in the published setting the ratio of naive to bucketed says little more than the figures themselves; for
other strategies, sizes and models it is a prediction. ``tools/bench/gpu.sh`` measures plans where there is a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from megatron_tlt.speculation.graph_pool import (
    Graph,
    GraphPlan,
    buckets_by_verify_tokens,
    plan_bucketed,
    plan_naive,
    plan_single,
)
from megatron_tlt.speculation.strategy import Strategy

GB = 1e9


@dataclass(frozen=True)
class ModelDimensions:
    """The target's shape on one rank of ``tensor_parallel_size``; ``dtype_bytes`` of an activation."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tensor_parallel_size: int = 1
    dtype_bytes: int = 2

    @property
    def output_bytes(self) -> int:
        """Bytes of a last hidden state."""
        return self.hidden_size * self.dtype_bytes

    @property
    def activation_bytes(self) -> float:
        """Bytes per token of the tensors of one layer, which later layers and other graphs use again."""
        heads = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        sharded = heads + 3 * self.intermediate_size
        return self.dtype_bytes * (4 * self.hidden_size + sharded / self.tensor_parallel_size)


@dataclass(frozen=True)
class GraphMemory:
    """Bytes on one rank.

    ``bytes_per_layer``: what a captured layer's kernels take, whatever their sizes. ``bytes_per_runner``: attention
    workspaces and input buffers of what captures: one runner for each number of tokens that the target verifies (plain
    decoding is one), one for each strategy's draft prefill and one for its draft decode.
    """

    bytes_per_layer: float
    bytes_per_runner: float

    def graph_bytes(self, graph: Graph, model: ModelDimensions) -> float:
        """One graph's own memory: its layers (a drafter has one) and the outputs that it keeps for their reader.

        Those are the target's hidden states of all tokens, and the drafter's of each request's last token.
        """
        outputs = graph.num_tokens if graph.kind == "target" else graph.batch
        return _layers(graph, model) * self.bytes_per_layer + outputs * model.output_bytes

    def plan_bytes(self, plan: GraphPlan, model: ModelDimensions) -> float:
        """All graphs, their runners, and the activations of the largest (graphs share one pool)."""
        own = sum(self.graph_bytes(graph, model) for graph in plan.graphs)
        return own + _pool_bytes(plan, model) + num_runners(plan) * self.bytes_per_runner


def num_runners(plan: GraphPlan) -> int:
    """Target runners by the tokens they verify (and their owner, where not shared), draft runners by strategy."""
    keys = {(g.kind, g.tokens_per_request if g.kind == "target" else 0, g.owner) for g in plan.graphs}
    return len(keys)


def _layers(graph: Graph, model: ModelDimensions) -> int:
    return model.num_hidden_layers if graph.kind == "target" else 1


def _pool_bytes(plan: GraphPlan, model: ModelDimensions) -> float:
    return max((graph.num_tokens for graph in plan.graphs), default=0) * model.activation_bytes


@dataclass(frozen=True)
class PublishedSetting:
    """The figures that the constants were fitted on: plans by kind, and the gigabytes published for them."""

    source: str
    model: ModelDimensions
    plans: dict[str, GraphPlan]
    gigabytes: dict[str, float]
    fitted_on: tuple[str, ...]
    memory: GraphMemory


def fit_memory(plans: Mapping[str, GraphPlan], gigabytes: Mapping[str, float], model: ModelDimensions) -> GraphMemory:
    """The two constants with which two plans take what was measured for them.

    Raises:
        ValueError: not two plans, or ones that cannot be told apart.
    """
    if len(plans) != 2:
        raise ValueError(f"plans {', '.join(plans) or 'none'}; allowed: two, as there are two constants")
    layers = [[sum(_layers(graph, model) for graph in plan.graphs), num_runners(plan)] for plan in plans.values()]
    known = GraphMemory(0.0, 0.0)
    rest = [gigabytes[name] * GB - known.plan_bytes(plan, model) for name, plan in plans.items()]
    try:
        per_layer, per_runner = np.linalg.solve(np.asarray(layers, float), np.asarray(rest))
    except np.linalg.LinAlgError as error:
        raise ValueError(f"plans {', '.join(plans)} have graphs and runners in the same proportion") from error
    return GraphMemory(float(per_layer), float(per_runner))


def comparison_plans(
    strategies: tuple[Strategy, ...], starts: tuple[int, ...], threshold: int, capture_sizes: tuple[int, ...]
) -> dict[str, GraphPlan]:
    """The plans compared: the strategy that verifies most alone, all naively, all bucketed.

    Raises:
        ValueError: strategies and starts that do not go together, or bad capture sizes.
    """
    buckets = buckets_by_verify_tokens(strategies, starts, threshold)
    return {
        "single": plan_single(max(strategies, key=lambda strategy: strategy.verify_tokens), capture_sizes),
        "naive": plan_naive(strategies, capture_sizes),
        "bucketed": plan_bucketed(buckets, threshold, capture_sizes),
    }


def load_published() -> PublishedSetting:
    """The data file beside this module."""
    text = resources.files(__package__).joinpath("graph_memory.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    setting = data["setting"]
    plans = comparison_plans(
        tuple(map(Strategy.parse, setting["strategies"])),
        tuple(setting["bucket_starts"]),
        setting["threshold"],
        tuple(setting["capture_sizes"]),
    )
    return PublishedSetting(
        data["source"],
        ModelDimensions(**data["model"]),
        plans,
        data["gigabytes"],
        tuple(data["fitted_on"]),
        GraphMemory(**data["constants"]),
    )
