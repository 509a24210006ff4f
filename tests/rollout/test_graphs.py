"""What vLLM would capture for a plan, asked of its own classes without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.bench.graph_memory import comparison_plans
from megatron_tlt.config.speculation import AdaptiveConfig, SpeculationConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout import vllm_setup
from megatron_tlt.rollout.adaptive import pool_of
from megatron_tlt.rollout.vllm_graphs import (
    REQUIRED_GRAPH_ATTRIBUTES,
    check_graph_interface,
    draft_lengths,
    engine_arguments,
    every_length,
    graphs_by_tokens,
    plan_shapes,
    planned_graphs,
)
from megatron_tlt.rollout.vllm_setup import prepare_environment
from megatron_tlt.speculation.graph_pool import BatchBucket, GraphPlan, plan_bucketed, plan_single
from megatron_tlt.speculation.strategy import OFF, Strategy

STRATEGIES = tuple(Strategy("eagle", k) for k in (7, 5, 3, 1))
THRESHOLD, MAX_SEQS, MAX_TOKENS = 16, 48, 4096
PLANS = comparison_plans(STRATEGIES, (1, 2, 4, 9), THRESHOLD, (1, 2, 4, 8, 16, 24, 32, 48))
BUCKETED = PLANS["bucketed"]
# two strategies in each bucket, one of them without drafts
SEVERAL = plan_bucketed(
    [BatchBucket(1, 3, (STRATEGIES[0], STRATEGIES[2], OFF)), BatchBucket(4, 16, (STRATEGIES[1], OFF))],
    THRESHOLD,
    (1, 2, 4, 8, 16, 32, 48),
)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What vLLM's managers ask of the platform and of pipeline parallelism when they are built."""
    prepare_environment()
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(type(current_platform), "_global_graph_pool", object())
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    yield


def vllm_config(
    plan: GraphPlan, folders: tuple[Path, Path], runner: str = "v2", speculative: dict[str, Any] | None = None
) -> Any:
    """The real configuration of an engine with the plan's arguments.

    A CPU's platform takes graphs out of it; vLLM's own method then computes their sizes again, as it does on a GPU.
    """
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    model, head = folders
    arguments = engine_arguments(plan, MAX_SEQS, MAX_TOKENS, runner)  # type: ignore[arg-type]
    speculative = speculative or {"method": "eagle", "model": str(head), **arguments["speculative_config"]}
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=256,
        compilation_config=arguments["compilation_config"],
        speculative_config=speculative,
    ).create_engine_config()
    config.compilation_config = CompilationConfig(**arguments["compilation_config"])
    config.model_config.enforce_eager = False
    config._set_cudagraph_sizes()
    assert (
        config.compilation_config.cudagraph_capture_sizes == arguments["compilation_config"]["cudagraph_capture_sizes"]
    )
    return config


def target_manager(config: Any) -> Any:
    from vllm.v1.worker.gpu import model_runner

    return model_runner.ModelCudaGraphManager(
        config, "cuda", config.compilation_config.cudagraph_mode, config.num_speculative_tokens + 1
    )


def draft_manager(config: Any, decode_query_len: int) -> Any:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    mode = config.compilation_config.cudagraph_mode
    return speculator.SpeculatorCudaGraphManager(config, "cuda", mode, decode_query_len)


def captured(manager: Any) -> list[tuple[int, int]]:
    descs = [desc for found in manager._capture_descs.values() for desc in found]
    assert all(
        desc.cg_mode.name == "FULL" and desc.num_tokens == desc.num_reqs * desc.uniform_token_count for desc in descs
    )
    return [(desc.num_reqs, desc.uniform_token_count) for desc in descs]


@pytest.mark.parametrize("plan", [BUCKETED, SEVERAL, PLANS["naive"], PLANS["single"]], ids=lambda plan: plan.kind)
def test_v2_captures_the_plan_and_nothing_else(plan: GraphPlan, folders: tuple[Path, Path]) -> None:
    config = vllm_config(plan, folders)
    with planned_graphs(plan):
        target = target_manager(config)
        prefill, decode = draft_manager(config, config.num_speculative_tokens + 1), draft_manager(config, 1)
    shapes = {(graph.batch, graph.tokens_per_request) for graph in plan.graphs if graph.kind == "target"}
    assert sorted(captured(target)) == sorted(shapes)
    assert sorted(captured(prefill)) == sorted(shapes), "the drafter reads along in every step"
    assert set(captured(decode)) == {(graph.batch, 1) for graph in plan.graphs if graph.kind == "draft_decode"}
    tokens = [desc.num_tokens for found in target._capture_descs.values() for desc in found]
    assert tokens == sorted(tokens, reverse=True), "vLLM captures the largest first"


def test_a_schedule_of_every_length_has_graphs_for_every_length(folders: tuple[Path, Path]) -> None:
    schedule = every_length(SEVERAL, MAX_SEQS)
    lengths = {strategy.num_tokens for strategy in SEVERAL.strategies}
    assert {length for *_, length in schedule} == lengths and len(lengths) > 2
    assert [first for first, *_ in schedule[1:]] == [last + 1 for _, last, _ in schedule[:-1]]
    assert (schedule[0][0], schedule[-1][1]) == (1, MAX_SEQS)
    config = vllm_config(SEVERAL, folders)
    config.speculative_config.num_speculative_tokens_per_batch_size = schedule
    assert {tokens for _, tokens in captured(target_manager(config))} == {length + 1 for length in lengths}
    with pytest.raises(ConfigError, match=r"max_num_seqs is 2; .* draft lengths, allowed: at least as many sequences"):
        every_length(SEVERAL, 2)


def test_without_a_drafter_model_uniform_batches_have_full_graphs_and_others_piecewise_ones(
    folders: tuple[Path, Path],
) -> None:
    speculation = SpeculationConfig(drafter="suffix", num_speculative_tokens=3, adaptive=AdaptiveConfig(threshold=16))
    plan = pool_of(speculation, MAX_SEQS, MAX_TOKENS)
    ngram = vllm_setup.speculative_config(speculation, "v2")
    assert ngram is not None
    config = vllm_config(plan, folders, speculative=ngram)
    config.speculative_config.num_speculative_tokens_per_batch_size = every_length(plan, MAX_SEQS)
    with planned_graphs(plan):
        target = target_manager(config)
    piecewise = next(found for mode, found in target._capture_descs.items() if mode.name == "PIECEWISE")
    assert [desc.num_tokens for desc in piecewise] == sorted(config.compilation_config.cudagraph_capture_sizes)[::-1]
    full = {(desc.num_reqs, desc.uniform_token_count) for desc in target._capture_descs[_full()]}
    assert full == plan_shapes(plan, "target") and {tokens for _, tokens in full} == {1, 2, 4}
    target._graphs_captured = True
    for batch in range(1, MAX_SEQS + 1):
        off = target.dispatch(batch, batch, 1, 0, max_query_len=1)
        assert off.cg_mode.name == "FULL" and off.uniform_token_count == 1, "off, and nothing found"
    for drafts in (1, 3):
        desc = target.dispatch(5, 5 * (drafts + 1), drafts + 1, 0, max_query_len=drafts + 1)
        assert desc.cg_mode.name == "FULL" and desc.uniform_token_count == drafts + 1
    ragged = target.dispatch(3, 7, None, 0, max_query_len=4)
    assert ragged.cg_mode.name == "PIECEWISE" and ragged.num_tokens == 8


def _full() -> Any:
    from vllm.config.compilation import CUDAGraphMode

    return CUDAGraphMode.FULL


def test_left_alone_vllm_captures_every_size_at_every_length(folders: tuple[Path, Path]) -> None:
    config = vllm_config(BUCKETED, folders)
    stock = set(captured(target_manager(config)))
    planned = plan_shapes(BUCKETED, "target")
    assert planned < stock and len(stock) > 2 * len(planned)
    with planned_graphs(BUCKETED):
        pass
    assert set(captured(target_manager(config))) == stock, "the hook is gone"


@pytest.mark.parametrize("plan", [BUCKETED, SEVERAL], ids=["one each", "several"])
def test_every_batch_finds_the_planned_graph(plan: GraphPlan, folders: tuple[Path, Path]) -> None:
    config = vllm_config(plan, folders)
    with planned_graphs(plan):
        target, decode = target_manager(config), draft_manager(config, 1)
    target._graphs_captured = decode._graphs_captured = True
    cases = [(b, s) for bucket in plan.buckets for b in range(bucket.low, bucket.high + 1) for s in bucket.strategies]
    cases += [(batch, OFF) for batch in range(THRESHOLD + 1, MAX_SEQS + 1)]
    for batch, strategy in cases:
        planned, verify = plan.find(strategy, batch), strategy.verify_tokens
        desc = target.dispatch(batch, batch * verify, verify, 0, max_query_len=verify)
        assert planned is not None and (desc.num_reqs, desc.uniform_token_count) == (planned.batch, verify)
        if strategy.num_tokens > 1:
            assert decode.dispatch(batch, batch, 1, 0).num_reqs == planned.batch
    ragged = target.dispatch(3, 7, None, 0, max_query_len=4)
    beyond = target.dispatch(MAX_SEQS + 1, MAX_SEQS + 1, 1, 0, max_query_len=1)
    assert ragged.cg_mode.name == beyond.cg_mode.name == "NONE"


@pytest.mark.parametrize("plan", [BUCKETED, SEVERAL], ids=["one each", "several"])
def test_fused_draft_graphs_are_per_length_of_their_bucket(
    plan: GraphPlan, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM records all draft steps as one graph, right before capture; capturing itself needs a GPU."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    monkeypatch.setattr(CudaGraphManager, "capture", lambda *_: None)
    config = vllm_config(plan, folders)
    nothing: list[Any] = [None] * 6

    def lengths(manager: Any) -> list[tuple[int, int]]:
        manager.capture(*nothing, specialize_spec_tokens=True)
        descs = [desc for found in manager._capture_descs.values() for desc in found]
        assert len(set(descs)) == len(descs)
        return sorted((desc.num_reqs, desc.num_speculative_tokens) for desc in descs)

    with planned_graphs(plan):
        planned = lengths(draft_manager(config, 1))
    assert planned == sorted((batch, k) for batch, found in draft_lengths(plan).items() for k in found)
    assert planned == sorted((g.batch, g.owner.num_tokens) for g in plan.graphs if g.kind == "draft_decode" and g.owner)
    assert len(lengths(draft_manager(config, 1))) > len(planned)


def v1_dispatcher(config: Any, support: str) -> Any:
    """Runner V1's dispatcher after the steps in which an engine's start settles its graphs."""
    from vllm.config import CompilationMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    compilation, most = config.compilation_config, config.num_speculative_tokens + 1
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    compilation.resolve_cudagraph_mode_and_sizes(AttentionCGSupport[support], "FLASH_ATTN", most)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, most)
    return dispatcher


@pytest.mark.parametrize(("support", "expected"), [("ALWAYS", "FULL"), ("UNIFORM_BATCH", "PIECEWISE")])
@pytest.mark.parametrize("plan", [BUCKETED, SEVERAL], ids=["one each", "several"])
def test_v1_captures_the_plans_numbers_of_tokens(
    plan: GraphPlan, folders: tuple[Path, Path], support: str, expected: str
) -> None:
    with graphs_by_tokens(required=False):
        dispatcher = v1_dispatcher(vllm_config(plan, folders, runner="v1"), support)
    ((mode, descs),) = dispatcher.get_capture_descs()
    assert mode.name == expected
    sizes = sorted({batch * tokens for batch, tokens in plan_shapes(plan, "target")})
    assert sorted(desc.num_tokens for desc in descs) == sizes
    for bucket in plan.buckets:
        for batch in range(bucket.low, bucket.high + 1):
            for strategy in bucket.strategies:
                planned = plan.find(strategy, batch)
                found, desc = dispatcher.dispatch(batch * strategy.verify_tokens)
                assert found.name == expected and planned is not None
                assert batch * strategy.verify_tokens <= desc.num_tokens <= planned.num_tokens
    for tokens in range(1, sizes[-1] + 1):  # requests with different numbers of drafts, or with prompts
        assert dispatcher.dispatch(tokens)[0].name == expected
    assert dispatcher.dispatch(sizes[-1] + 1)[0].name == "NONE"


def test_left_alone_v1_rounds_full_graphs_up_to_the_longest_drafts(folders: tuple[Path, Path]) -> None:
    dispatcher = v1_dispatcher(vllm_config(SEVERAL, folders, runner="v1"), "ALWAYS")
    assert dispatcher.dispatch(1)[1].num_tokens == 8, "a request without drafts computes eight tokens"


def test_full_graphs_that_a_backend_lacks_are_refused_where_they_were_asked_for(folders: tuple[Path, Path]) -> None:
    config = vllm_config(BUCKETED, folders, runner="v1")
    with graphs_by_tokens(required=True), pytest.raises(ConfigError, match=r"FLASH_ATTN .* UNIFORM_BATCH at most"):
        v1_dispatcher(config, "UNIFORM_BATCH")


def test_graphs_larger_than_a_request_are_captured_for_requests_of_the_allowed_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM takes the graph's tokens for each request's length: attention would read beyond the block tables."""
    from types import SimpleNamespace

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    calls: list[tuple[int, int | None]] = []

    def dummy_run(runner: object, num_tokens: int, profile_seq_lens: int | None = None, **_: object) -> None:
        calls.append((num_tokens, profile_seq_lens))

    monkeypatch.setattr(GPUModelRunner, "_dummy_run", dummy_run)
    runner = SimpleNamespace(max_model_len=558)
    with graphs_by_tokens(required=False):
        for tokens, options in (
            (1024, {"is_graph_capturing": True}),
            (1024, {"profile_seq_lens": 8}),
            (1024, {"uniform_decode": True}),
            (1024, {"create_mixed_batch": True}),
            (512, {}),
        ):
            GPUModelRunner._dummy_run(runner, tokens, **options)
    assert calls == [(1024, 558), (1024, 8), (1024, None), (1024, None), (512, None)]
    assert GPUModelRunner._dummy_run is dummy_run


def test_the_schedule_drafts_in_buckets_and_not_above(folders: tuple[Path, Path]) -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    arguments = engine_arguments(BUCKETED, MAX_SEQS, MAX_TOKENS)["speculative_config"]
    assert arguments["num_speculative_tokens"] == 7
    lookup = build_dynamic_sd_schedule_lookup(arguments["num_speculative_tokens_per_batch_size"], MAX_SEQS, 7)
    for bucket in BUCKETED.buckets:
        assert {lookup[batch] for batch in range(bucket.low, bucket.high + 1)} == {bucket.strategies[0].num_tokens}
    assert set(lookup[THRESHOLD + 1 :]) == {0}
    config = vllm_config(BUCKETED, folders)
    assert config.speculative_config.uses_dynamic_speculative_decoding()


def test_plans_without_drafts_or_buckets() -> None:
    assert "speculative_config" not in engine_arguments(plan_single(OFF, [1, 4]), 8, 64)
    single = engine_arguments(plan_single(STRATEGIES[2], [1, 4]), 8, 64)
    assert single["speculative_config"] == {"num_speculative_tokens": 3}
    assert single["compilation_config"]["cudagraph_capture_sizes"] == [4, 16]


def test_what_the_engine_has_no_room_for_is_refused() -> None:
    plan = plan_single(STRATEGIES[2], [1, 16])
    with pytest.raises(ConfigError, match="16 requests; allowed: max_num_seqs, 8"):
        engine_arguments(plan, 8, 64)
    with pytest.raises(ConfigError, match="64 tokens; allowed: max_num_batched_tokens, 32"):
        engine_arguments(plan, 16, 32)


def test_a_moved_part_is_named() -> None:
    check_graph_interface()
    moved = (*REQUIRED_GRAPH_ATTRIBUTES, ("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager.gone"))
    with pytest.raises(
        RunError, match=r"lacks vllm\.v1\.worker\.gpu\.cudagraph_utils\.CudaGraphManager\.gone, .*0\.32\.x"
    ):
        check_graph_interface(moved)
