"""Plans the CUDA graphs to capture for a set of strategies (TLT: bucketed CUDA-graph pool)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_tlt.speculation.strategy import MODEL_FREE, OFF, Strategy

PlanKind = Literal["single", "naive", "bucketed"]
GraphKind = Literal["target", "draft_prefill", "draft_decode"]


@dataclass(frozen=True)
class BatchBucket:
    """Strategies that may run with ``low`` to ``high`` requests (both included)."""

    low: int
    high: int
    strategies: tuple[Strategy, ...]

    def __post_init__(self) -> None:
        """Reject an empty bucket.

        Raises:
            ValueError: ``low`` is below 1 or above ``high``, or there is no strategy (``OFF`` is one).
        """
        if not 1 <= self.low <= self.high:
            raise ValueError(f"bucket {self.low}..{self.high}: allowed are ranges of batch sizes from 1 on")
        if not self.strategies:
            raise ValueError(f"bucket {self.low}..{self.high} has no strategy; allowed: at least one, which may be off")


@dataclass(frozen=True)
class Graph:
    """One graph: ``batch`` requests with ``tokens_per_request`` each.

    ``target`` verifies drafts, or decodes plainly with one token per request. ``draft_prefill`` runs the drafter over
    the verified tokens and makes the first draft token; ``draft_decode`` makes the next one. ``owner`` is the only
    strategy that uses the graph, None for a shared graph.
    """

    kind: GraphKind
    batch: int
    tokens_per_request: int
    owner: Strategy | None = None

    @property
    def num_tokens(self) -> int:
        return self.batch * self.tokens_per_request

    @property
    def is_plain(self) -> bool:
        """Whether it decodes without drafts."""
        return self.kind == "target" and self.tokens_per_request == 1


@dataclass(frozen=True)
class GraphPlan:
    """The distinct graphs to capture, and the strategies that they serve (``OFF`` if there are plain graphs)."""

    kind: PlanKind
    graphs: tuple[Graph, ...]
    strategies: tuple[Strategy, ...]
    buckets: tuple[BatchBucket, ...] = ()

    def find(self, strategy: Strategy, batch: int) -> Graph | None:
        """The smallest target graph for a batch under a strategy; None if there is none."""
        fitting = [
            graph
            for graph in self.graphs
            if graph.kind == "target"
            and graph.tokens_per_request == strategy.verify_tokens
            and graph.batch >= batch
            and graph.owner in (None, _captured_as(strategy))
        ]
        return min(fitting, key=lambda graph: graph.batch, default=None)

    def count(self, kind: GraphKind | None = None) -> int:
        """Number of graphs, of one kind or of all."""
        return sum(kind in (None, graph.kind) for graph in self.graphs)


def capture_sizes(largest: int) -> tuple[int, ...]:
    """vLLM's own grid of batches: 1, 2, 4, steps of 8 to 256, then of 16; and the largest."""
    grid = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16), largest)
    return tuple(sorted({size for size in grid if size <= largest}))


def buckets_by_verify_tokens(
    strategies: Iterable[Strategy], starts: Sequence[int], threshold: int
) -> tuple[BatchBucket, ...]:
    """Buckets that begin at ``starts``, the last up to ``threshold``; most tokens to verify on the smallest batches.

    Raises:
        ValueError: the number of starts and of different token counts differ, or starts do not ascend from 1.
    """
    groups: dict[int, list[Strategy]] = {}
    for strategy in sorted(strategies, key=lambda strategy: -strategy.verify_tokens):
        groups.setdefault(strategy.verify_tokens, []).append(strategy)
    edges = [*starts, threshold + 1]
    if len(starts) != len(groups):
        raise ValueError(f"{len(starts)} starts; allowed: {len(groups)}, as strategies verify {sorted(groups)} tokens")
    if edges[0] != 1 or any(high <= low for low, high in pairwise(edges)):
        raise ValueError(f"buckets start at {list(starts)}; allowed: ascending from 1, up to the threshold {threshold}")
    return tuple(
        BatchBucket(low, high - 1, tuple(group))
        for (low, high), group in zip(pairwise(edges), groups.values(), strict=True)
    )


def plan_single(strategy: Strategy, capture_sizes: Iterable[int]) -> GraphPlan:
    """One strategy for all batches, as an engine without adaptation captures it.

    Raises:
        ValueError: no capture size, or one below 1.
    """
    graphs = _graphs(strategy, _checked(capture_sizes), shared=True)
    return GraphPlan("single", _distinct(graphs), (_captured_as(strategy),))


def plan_naive(strategies: Iterable[Strategy], capture_sizes: Iterable[int]) -> GraphPlan:
    """Each strategy with its own graphs for all sizes, without sharing.

    Raises:
        ValueError: no capture size, or one below 1.
    """
    sizes = _checked(capture_sizes)
    alone = tuple(dict.fromkeys(map(_captured_as, strategies)))
    return GraphPlan("naive", _distinct(g for strategy in alone for g in _graphs(strategy, sizes, shared=False)), alone)


def plan_bucketed(buckets: Iterable[BatchBucket], threshold: int, capture_sizes: Iterable[int]) -> GraphPlan:
    """Each strategy for the sizes of its buckets only; target graphs of equal verify size are shared.

    A bucket's sizes are those of ``capture_sizes`` within it and its own end, so that each batch in it has a graph not
    larger than the bucket. Plain graphs are captured above ``threshold``, where speculation is off, and in buckets that
    list ``OFF``. Batches above the largest capture size run without a graph.

    Raises:
        ValueError: no capture size or one below 1, or buckets that do not cover 1 to ``threshold`` once each.
    """
    sizes = _checked(capture_sizes)
    ordered = tuple(sorted(buckets, key=lambda bucket: bucket.low))
    edges = [1, *(bucket.high + 1 for bucket in ordered)]
    if [bucket.low for bucket in ordered] != edges[:-1] or edges[-1] != threshold + 1:
        found = ", ".join(f"{bucket.low}..{bucket.high}" for bucket in ordered) or "none"
        raise ValueError(f"buckets {found}; allowed: ones that cover 1..{threshold} (the threshold), each batch once")
    graphs: list[Graph] = []
    strategies: list[Strategy] = []
    for bucket in ordered:
        last = min(bucket.high, sizes[-1])
        if bucket.low > last:
            continue
        own = sorted({last, *(size for size in sizes if bucket.low <= size <= last)})
        for strategy in map(_captured_as, bucket.strategies):
            graphs += _graphs(strategy, own, shared=True)
            strategies.append(strategy)
    if above := [size for size in sizes if size > threshold]:
        graphs += _graphs(OFF, above, shared=True)
        strategies.append(OFF)
    return GraphPlan("bucketed", _distinct(graphs), tuple(dict.fromkeys(strategies)), ordered)


def _captured_as(strategy: Strategy) -> Strategy:
    """The strategy whose graphs this one uses: that of a pair's head, without budgets by length or bounds.

    Budgets and bounds only leave slots of the same graphs empty.
    """
    return Strategy(strategy.drafters[-1], strategy.num_tokens) if strategy.drafters else OFF


def _graphs(strategy: Strategy, sizes: Sequence[int], shared: bool) -> list[Graph]:
    verify = strategy.verify_tokens
    graphs = [Graph("target", size, verify, None if shared else strategy) for size in sizes]
    if strategy.drafter != "off" and strategy.drafter not in MODEL_FREE:
        graphs += [Graph("draft_prefill", size, verify, strategy) for size in sizes]
        # the prefill makes the first draft token
        graphs += [Graph("draft_decode", size, 1, strategy) for size in sizes if strategy.num_tokens > 1]
    return graphs


def _distinct(graphs: Iterable[Graph]) -> tuple[Graph, ...]:
    """Distinct graphs, largest first, so that later captures reuse the memory of earlier ones."""
    return tuple(sorted(dict.fromkeys(graphs), key=lambda graph: (graph.kind, -graph.num_tokens, -graph.batch)))


def _checked(capture_sizes: Iterable[int]) -> list[int]:
    sizes = sorted(set(capture_sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"capture sizes {sizes}; allowed: at least one, all 1 and more")
    return sizes
