"""Make vLLM capture the CUDA graphs of a plan (``speculation/graph_pool.py``) on GPUs.

vLLM 0.32 has two model runners. V2, the default for EAGLE and ngram on GPUs, captures full graphs of uniform decode
batches by (requests, tokens per request). By default it captures every capture size at every draft length of its
schedule. ``planned_graphs`` replaces them by the plan's: the target's graphs and EAGLE's prefill and decode graphs.
V1, the default of engines here, captures graphs by number of tokens, which all strategies share. Engines receive the
sizes of ``adaptive.pool_of``. ``graphs_by_tokens`` makes vLLM capture them as full graphs for any batch of that many
tokens, where the attention backend allows it (FlashAttention 3), else as piecewise graphs. V1 captures piecewise graphs
of the drafter at the same sizes.

V2 runs a drafter's prefill in every step, even without draft tokens, so that its KV cache has no gaps. A plan with a
drafter model therefore gets a draft prefill for each target graph, including plain ones, which the plan omits.
Batches whose requests have different numbers of draft tokens are not uniform, and steps that include a prompt are not
decoding: full graphs do not serve them. With a drafter model V2 runs them without a graph. Model-free drafters find
drafts for some requests only, so their engines also get piecewise graphs at the plan's sizes, which the plan does not
count.

What has run on a GPU is in ``docs/benchmarks/gpu.md``: full graphs of V1, on vLLM 0.26. Plans of V2 have not, and the
memory of no captured graph has been compared with the plan's. ``tests/rollout/test_graphs.py`` checks with vLLM's own
classes which graphs V2 would capture and which graph a batch would use; it captures nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.vllm_versions import NEWEST_RELEASE, missing_attributes
from megatron_tlt.speculation.graph_pool import GraphKind, GraphPlan
from megatron_tlt.speculation.strategy import OFF

Runner = Literal["v1", "v2"]
Shapes = frozenset[tuple[int, int]]
"""(requests, tokens per request)."""

_UTILS = "vllm.v1.worker.gpu.cudagraph_utils"
_DRAFT_UTILS = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils"
# vLLM attributes that this file uses in addition to ``vllm_versions.REQUIRED_ATTRIBUTES``
REQUIRED_GRAPH_ATTRIBUTES: tuple[tuple[str, str], ...] = (
    ("vllm.config.compilation", "CUDAGraphMode.FULL_DECODE_ONLY"),
    (_UTILS, "BatchExecutionDescriptor"),
    (_UTILS, "CudaGraphManager._init_candidates"),
    (_UTILS, "CudaGraphManager.capture"),
    (_UTILS, "CudaGraphManager.dispatch"),
    (_DRAFT_UTILS, "SpeculatorBatchDescriptor"),
    (_DRAFT_UTILS, "SpeculatorCudaGraphManager.specialize_spec_tokens"),
    ("vllm.v1.worker.gpu.model_runner", "ModelCudaGraphManager"),
    ("vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator", "SpeculatorCudaGraphManager"),
)
_DESCRIPTOR_FIELDS = {"cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "num_active_loras"}


def engine_arguments(
    plan: GraphPlan, max_num_seqs: int, max_num_batched_tokens: int, runner: Runner = "v2"
) -> dict[str, Any]:
    """The plan as arguments of vLLM's EngineArgs: ``compilation_config``, and ``speculative_config`` if it speculates.

    ``speculative_config`` has the maximum draft length and the schedule of draft lengths by batch size (each bucket's
    longest, 0 above the last bucket). The caller adds method and model. Without buckets there is no schedule.

    Raises:
        ConfigError: the plan has no target graphs, or graphs larger than the engine's limits.
    """
    shapes = plan_shapes(plan, "target")
    if not shapes:
        raise ConfigError("the plan has no target graphs; allowed: at least one")
    if (most := max(batch for batch, _ in shapes)) > max_num_seqs:
        raise ConfigError(f"the plan has a graph for {most} requests; allowed: max_num_seqs, {max_num_seqs}")
    sizes = sorted({batch * tokens for batch, tokens in shapes})
    if sizes[-1] > max_num_batched_tokens:
        limit = f"max_num_batched_tokens, {max_num_batched_tokens}"
        raise ConfigError(f"the plan has a graph of {sizes[-1]} tokens; allowed: {limit}")
    mode = "FULL"
    if runner == "v2":  # without a drafter model few batches are uniform: the others need piecewise graphs
        mode = "FULL_DECODE_ONLY" if plan.count("draft_prefill") else "FULL_AND_PIECEWISE"
    arguments: dict[str, Any] = {"compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}}
    longest = max(strategy.num_tokens for strategy in plan.strategies)
    if longest:
        arguments["speculative_config"] = {"num_speculative_tokens": longest}
        if plan.buckets:
            schedule = [(b.low, b.high, max(s.num_tokens for s in b.strategies)) for b in plan.buckets]
            if OFF in plan.strategies and (last := plan.buckets[-1].high) < max_num_seqs:
                schedule.append((last + 1, max_num_seqs, 0))
            arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = schedule
    return arguments


def every_length(plan: GraphPlan, max_num_seqs: int) -> list[tuple[int, int, int]]:
    """A schedule (first batch, last batch, drafts) that names every draft length of the plan, for vLLM to capture.

    Which batches have which length is of no importance: ``StrategySwitch`` sets the length of each step.

    Raises:
        ConfigError: there are more lengths than batch sizes.
    """
    lengths = sorted({strategy.num_tokens for strategy in plan.strategies})
    if len(lengths) > max_num_seqs:
        raise ConfigError(
            f"rollout.vllm.max_num_seqs is {max_num_seqs}; the strategies have {len(lengths)} draft lengths, allowed: "
            "at least as many sequences"
        )
    lasts = [*range(1, len(lengths)), max_num_seqs]
    return [(batch, last, length) for batch, (last, length) in enumerate(zip(lasts, lengths, strict=True), start=1)]


def plan_shapes(plan: GraphPlan, kind: GraphKind) -> Shapes:
    """The shapes by which vLLM distinguishes graphs of one kind (for draft decode also see ``draft_lengths``).

    Draft prefill has the target's shapes, because it runs in every step, or none.
    """
    if kind == "draft_prefill" and plan.count(kind):
        kind = "target"
    return frozenset((graph.batch, graph.tokens_per_request) for graph in plan.graphs if graph.kind == kind)


def draft_lengths(plan: GraphPlan) -> dict[int, tuple[int, ...]]:
    """The draft lengths to capture for each batch size of a draft decode graph.

    Where the attention backend allows it, vLLM captures all draft decode steps as one graph per length.
    """
    lengths: dict[int, set[int]] = {}
    for graph in plan.graphs:
        if graph.kind == "draft_decode" and graph.owner is not None:
            lengths.setdefault(graph.batch, set()).add(graph.owner.num_tokens)
    return {batch: tuple(sorted(found)) for batch, found in lengths.items()}


@contextmanager
def graphs_by_tokens(required: bool) -> Iterator[None]:
    """Make engines built in this context, with mode FULL, capture their sizes as they are (V1 runner).

    vLLM would round them up to multiples of 1 + the most drafts, which only graphs of uniform batches need. A step
    without drafts would then compute that many times the tokens. A backend whose full graphs are for uniform batches
    only gets piecewise graphs instead: its full graphs would not serve other numbers of drafts.

    A graph of more tokens than a request may have is captured for requests of the allowed length: vLLM takes the
    number of tokens for it, and attention would read beyond the requests' block tables (an illegal memory access).

    Raises:
        ConfigError: full graphs are ``required``, and the attention backend does not allow them.
    """
    from vllm.config.compilation import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    upstream = CompilationConfig.resolve_cudagraph_mode_and_sizes
    upstream_run = GPUModelRunner._dummy_run

    def resolve(config: Any, support: Any, backend: str | None, *rest: Any, **options: Any) -> Any:
        if config.cudagraph_mode == CUDAGraphMode.FULL and support != AttentionCGSupport.ALWAYS:
            if required:
                raise ConfigError(
                    f"rollout.cuda_graphs is full, but {backend} captures full graphs for {support.name} at most; "
                    "allowed: auto or piecewise"
                )
            config.cudagraph_mode = CUDAGraphMode.PIECEWISE
        sizes = config.cudagraph_capture_sizes, config.max_cudagraph_capture_size
        mode = upstream(config, support, backend, *rest, **options)
        if mode == CUDAGraphMode.FULL:
            config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = sizes
        return mode

    def dummy_run(runner: Any, num_tokens: int, **options: Any) -> Any:
        special = options.get("uniform_decode") or options.get("create_mixed_batch")
        if num_tokens > runner.max_model_len and not special and options.get("profile_seq_lens") is None:
            options["profile_seq_lens"] = runner.max_model_len
        return upstream_run(runner, num_tokens, **options)

    CompilationConfig.resolve_cudagraph_mode_and_sizes = resolve
    GPUModelRunner._dummy_run = dummy_run
    try:
        yield
    finally:
        CompilationConfig.resolve_cudagraph_mode_and_sizes = upstream
        GPUModelRunner._dummy_run = upstream_run


def can_plan_graphs() -> bool:
    """Whether the installed vLLM has what ``planned_graphs`` replaces; 0.26 captures every size at every length."""
    return not missing_attributes(REQUIRED_GRAPH_ATTRIBUTES)


def check_graph_interface(required: tuple[tuple[str, str], ...] = REQUIRED_GRAPH_ATTRIBUTES) -> None:
    """Check that the installed vLLM has the attributes that ``planned_graphs`` replaces.

    Raises:
        RunError: attributes are missing; the message names them.
    """
    missing = missing_attributes(required)
    if not missing:
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        fields = {field.name for field in dataclasses.fields(BatchExecutionDescriptor)}
        missing = [f"{_UTILS}.BatchExecutionDescriptor.{name}" for name in sorted(_DESCRIPTOR_FIELDS - fields)]
    if missing:
        raise RunError(
            f"vllm lacks {', '.join(missing)}, which plans of CUDA graphs use; install release {NEWEST_RELEASE}"
        )


@contextmanager
def planned_graphs(plan: GraphPlan) -> Iterator[None]:
    """Make engines built in this context capture the plan's full decode graphs instead of vLLM's choice (V2 runner).

    Build the engine with ``engine_arguments(plan, ...)``. Other graphs of the engine's mode remain vLLM's choice.

    Raises:
        RunError: the installed vLLM is not supported.
    """
    check_graph_interface()
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    upstream = model_runner.ModelCudaGraphManager, speculator.SpeculatorCudaGraphManager
    model_runner.ModelCudaGraphManager = _target_manager(upstream[0], plan_shapes(plan, "target"))
    speculator.SpeculatorCudaGraphManager = _draft_manager(
        upstream[1], plan_shapes(plan, "draft_prefill"), plan_shapes(plan, "draft_decode"), draft_lengths(plan)
    )
    try:
        yield
    finally:
        model_runner.ModelCudaGraphManager, speculator.SpeculatorCudaGraphManager = upstream


def _target_manager(upstream: Any, shapes: Shapes) -> Any:
    class PlannedCudaGraphManager(upstream):
        def _init_candidates(self) -> None:
            super()._init_candidates()
            _restrict(self, shapes)

    return PlannedCudaGraphManager


def _draft_manager(upstream: Any, prefill: Shapes, decode: Shapes, lengths: Mapping[int, tuple[int, ...]]) -> Any:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

    class PlannedSpeculatorCudaGraphManager(upstream):
        def _init_candidates(self) -> None:
            super()._init_candidates()
            # draft decode has one token per request, draft prefill at least two
            _restrict(self, decode if self.decode_query_len == 1 else prefill)

        @property
        def _capture_descs(self) -> dict[Any, list[Any]]:
            return self._planned_descs

        @_capture_descs.setter
        def _capture_descs(self, descs: dict[Any, list[Any]]) -> None:
            # vLLM combines all sizes with all draft lengths right before it captures
            self._planned_descs = {mode: specialized(found) for mode, found in descs.items()}

    def specialized(descs: list[Any]) -> list[Any]:
        if not descs or not isinstance(descs[0], SpeculatorBatchDescriptor):
            return descs
        bases = dict.fromkeys(dataclasses.replace(desc, num_speculative_tokens=0) for desc in descs)
        return [
            dataclasses.replace(base, num_speculative_tokens=length)
            for base in bases
            for length in sorted(lengths.get(base.num_reqs, ()), reverse=True)
        ]

    return PlannedSpeculatorCudaGraphManager


def _restrict(manager: Any, shapes: Shapes) -> None:
    """Make ``shapes`` the manager's full decode graphs, and dispatch each batch to the smallest one that fits.

    vLLM considers only graphs of the next larger number of tokens, which may all have another draft length.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    mode = manager.cudagraph_mode
    if not mode.separate_routine() or mode.decode_mode() != CUDAGraphMode.FULL:
        return  # this model or attention backend has no full decode graphs
    descs = [
        BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL,
            num_tokens=batch * tokens,
            num_reqs=batch,
            uniform_token_count=tokens,
            num_active_loras=loras,
        )
        for batch, tokens in sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))
        for loras in manager.lora_capture_cases
    ]
    others = {
        key: [desc for desc in found if desc.cg_mode != CUDAGraphMode.FULL]
        for key, found in manager._candidates.items()
    }
    manager._capture_descs.pop(CUDAGraphMode.FULL, None)
    if descs:
        manager._capture_descs[CUDAGraphMode.FULL] = descs
    manager._candidates = {key: found for key, found in others.items() if found}
    for loras in manager.lora_capture_cases:
        ascending = [desc for desc in reversed(descs) if desc.num_active_loras == loras]
        for tokens in range(ascending[-1].num_tokens + 1 if ascending else 0):
            fitting = [desc for desc in ascending if desc.num_tokens >= tokens]
            manager._candidates[tokens, loras] = fitting + others.get((tokens, loras), [])
