"""CUDA graph plans: every batch has exactly one graph; the memory model against its fitted data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.bench.graph_memory import (
    GB,
    GraphMemory,
    comparison_plans,
    fit_memory,
    load_published,
    num_runners,
)
from megatron_tlt.speculation.graph_pool import (
    BatchBucket,
    Graph,
    buckets_by_verify_tokens,
    plan_bucketed,
    plan_naive,
    plan_single,
)
from megatron_tlt.speculation.strategy import DRAFTERS, MODEL_FREE, OFF, Strategy

STRATEGIES = st.one_of(
    st.just(OFF), st.builds(Strategy, st.sampled_from(DRAFTERS[1:]), st.integers(1, 9), st.booleans())
)
SIZES = st.lists(st.integers(1, 80), min_size=1, max_size=20)


def captured(strategy: Strategy) -> Strategy:
    """The strategy whose graphs it runs: a pair uses its head's, for any budgets and bounds."""
    return Strategy(strategy.drafters[-1], strategy.num_tokens) if strategy != OFF else OFF


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[BatchBucket], int]:
    """Buckets that cover 1 to a threshold, and the threshold."""
    ends = sorted(draw(st.sets(st.integers(1, 48), min_size=1, max_size=5)))
    groups = [tuple(draw(st.lists(STRATEGIES, min_size=1, max_size=3))) for _ in ends]
    lows = [1, *(end + 1 for end in ends)]
    return [BatchBucket(*edges) for edges in zip(lows, ends, groups, strict=False)], ends[-1]


@given(buckets(), SIZES)
def test_a_bucketed_plan_has_exactly_the_graphs_of_its_buckets(
    made: tuple[list[BatchBucket], int], sizes: list[int]
) -> None:
    ordered, threshold = made
    plan = plan_bucketed(reversed(ordered), threshold, sizes)
    assert len(set(plan.graphs)) == len(plan.graphs)
    for bucket in ordered:
        for batch in range(bucket.low, min(bucket.high, max(sizes)) + 1):
            for strategy in bucket.strategies:
                graph = plan.find(strategy, batch)
                assert graph is not None and batch <= graph.batch <= bucket.high, "no larger than the bucket"
                drafts = [g for g in plan.graphs if g.owner == captured(strategy)]
                own = {g.kind for g in drafts if g.batch == graph.batch}
                if strategy.drafter == "off" or strategy.drafter in MODEL_FREE:
                    assert not drafts, "what is no model has no graphs"
                else:
                    assert own == {"draft_prefill", *(["draft_decode"] if strategy.num_tokens > 1 else [])}
    for batch in range(threshold + 1, max(sizes) + 1):
        plain = plan.find(OFF, batch)
        assert plain is not None and plain.batch == min(size for size in sizes if size >= batch)
    off = [bucket for bucket in ordered if OFF in bucket.strategies]
    for graph in plan.graphs:
        assert graph.batch in sizes or graph.batch in {min(bucket.high, max(sizes)) for bucket in ordered}
        if graph.is_plain and graph.batch <= threshold:
            assert any(bucket.low <= graph.batch <= bucket.high for bucket in off), "plain only above the threshold"
        if graph.owner is not None:
            mine = [b for b in ordered if graph.owner in map(captured, b.strategies)]
            assert any(bucket.low <= graph.batch <= bucket.high for bucket in mine)


@given(buckets(), SIZES)
def test_bucketed_never_has_more_target_graphs_than_naive_of_the_same_sizes(
    made: tuple[list[BatchBucket], int], sizes: list[int]
) -> None:
    ordered, threshold = made
    plan = plan_bucketed(ordered, threshold, sizes)
    every = {graph.batch for graph in plan.graphs} | set(sizes)
    naive = plan_naive([OFF, *(s for bucket in ordered for s in bucket.strategies)], every)
    memory, model = load_published().memory, load_published().model
    assert plan.count() <= naive.count() and memory.plan_bytes(plan, model) <= memory.plan_bytes(naive, model)


@given(st.lists(STRATEGIES, min_size=1, max_size=5), SIZES)
def test_naive_is_each_strategy_alone(strategies: list[Strategy], sizes: list[int]) -> None:
    naive = plan_naive(strategies, sizes)
    alone = set(map(captured, strategies))
    assert naive.count() == sum(plan_single(strategy, sizes).count() for strategy in alone)
    assert num_runners(naive) == sum(num_runners(plan_single(strategy, sizes)) for strategy in alone)
    for strategy in strategies:
        assert naive.find(strategy, max(sizes)) is not None and naive.find(strategy, max(sizes) + 1) is None


def test_strategies_with_equal_verification_share_target_graphs() -> None:
    same = (Strategy("eagle", 3), Strategy("eagle3", 3), Strategy("ngram", 3), Strategy("eagle", 3, by_length=True))
    same += (Strategy("suffix+eagle", 3), Strategy("eagle", 3, least_percent=50))
    plan = plan_bucketed([BatchBucket(1, 4, same)], 4, [1, 2, 4])
    assert plan.count("target") == 3 and plan.count("draft_prefill") == plan.count("draft_decode") == 6
    assert plan.find(same[2], 3) == plan.find(same[0], 3) == Graph("target", 4, 4)


def test_buckets_go_by_tokens_to_verify() -> None:
    strategies = [Strategy("eagle", 3), Strategy("ngram", 7), Strategy("eagle", 7), OFF]
    found = buckets_by_verify_tokens(strategies, (1, 3, 9), 16)
    assert [(b.low, b.high) for b in found] == [(1, 2), (3, 8), (9, 16)]
    assert [b.strategies for b in found] == [(strategies[1], strategies[2]), (strategies[0],), (OFF,)]


def test_the_memory_model_fits_its_data_and_predicts_the_third_figure() -> None:
    published = load_published()
    fitted = fit_memory({k: published.plans[k] for k in published.fitted_on}, published.gigabytes, published.model)
    assert (round(fitted.bytes_per_layer), round(fitted.bytes_per_runner)) == (
        published.memory.bytes_per_layer,
        published.memory.bytes_per_runner,
    ), "the data file's constants are what its figures give"
    for name, plan in published.plans.items():
        modelled = published.memory.plan_bytes(plan, published.model) / GB
        bound = 1e-6 if name in published.fitted_on else 0.02
        assert modelled == pytest.approx(published.gigabytes[name], rel=bound), name
    assert set(published.plans) - set(published.fitted_on) == {"naive"}


def test_memory_grows_with_tokens_and_model() -> None:
    published = load_published()
    memory, model = published.memory, published.model
    small, large = Graph("target", 4, 8), Graph("target", 8, 8)
    more = memory.graph_bytes(large, model) - memory.graph_bytes(small, model)
    assert more == 32 * model.hidden_size * 2
    draft = Graph("draft_prefill", 4, 8, Strategy("eagle", 7))
    assert memory.graph_bytes(draft, model) == memory.bytes_per_layer + 4 * model.hidden_size * 2
    plan = plan_single(Strategy("eagle", 7), [8])
    whole, cut = replace(model, tensor_parallel_size=1), replace(model, tensor_parallel_size=8)
    assert memory.plan_bytes(plan, whole) > memory.plan_bytes(plan, cut)
    nothing = GraphMemory(0.0, 0.0)
    assert nothing.plan_bytes(plan, model) == pytest.approx((64 + 8 + 8) * 8192 + 64 * model.activation_bytes)


@pytest.mark.parametrize(
    "call",
    [
        lambda: BatchBucket(0, 3, (OFF,)),
        lambda: BatchBucket(4, 3, (OFF,)),
        lambda: BatchBucket(1, 3, ()),
        lambda: plan_single(OFF, []),
        lambda: plan_naive([OFF], [0, 1]),
        lambda: plan_bucketed([BatchBucket(1, 3, (OFF,))], 4, [1]),
        lambda: plan_bucketed([BatchBucket(2, 4, (OFF,))], 4, [1]),
        lambda: plan_bucketed([BatchBucket(1, 3, (OFF,)), BatchBucket(3, 4, (OFF,))], 4, [1]),
        lambda: plan_bucketed([], 4, [1]),
        lambda: buckets_by_verify_tokens([OFF], (1, 2), 4),
        lambda: buckets_by_verify_tokens([OFF], (2,), 4),
        lambda: buckets_by_verify_tokens([OFF, Strategy("ngram", 2)], (1, 5), 4),
        lambda: comparison_plans((OFF,), (1,), 4, ()),
        lambda: fit_memory({}, {}, load_published().model),
    ],
)
def test_bad_input_is_named(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"allowed"):
        call()
