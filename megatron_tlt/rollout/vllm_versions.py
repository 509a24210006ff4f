"""Startup check that the installed vLLM is a supported release.

The ``vllm_*`` modules use parts of vLLM that are not a stable interface. They are listed here, so that a missing
attribute is reported by name at startup and not as an AttributeError during a rollout.
"""

from __future__ import annotations

import importlib
from functools import reduce

from megatron_tlt.errors import RunError
from megatron_tlt.platform.versions import REQUIREMENTS, installed_version

_VLLM = next(requirement for requirement in REQUIREMENTS if requirement.name == "vllm")
SUPPORTED_RELEASES = " or ".join(f"{series}x" for series in _VLLM.series)
NEWEST_RELEASE = f"{_VLLM.series[0]}x"

# (module, dotted attribute) used by rollout/vllm_*.py
REQUIRED_ATTRIBUTES: tuple[tuple[str, str], ...] = (
    ("vllm", "SamplingParams"),
    ("vllm.config.compilation", "CompilationConfig"),
    ("vllm.config.load", "LoadConfig"),
    ("vllm.config.speculative", "SpeculativeConfig"),
    ("vllm.engine.arg_utils", "EngineArgs"),
    ("vllm.platforms", "current_platform"),
    ("vllm.sampling_params", "RequestOutputKind.FINAL_ONLY"),
    ("vllm.v1.engine.core", "cleanup_dist_env_and_memory"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.from_engine_args"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.abort_request"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.step"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.has_unfinished_requests"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.reset_prefix_cache"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.sleep"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.wake_up"),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"),
    ("vllm.v1.engine", "FinishReason.ABORT"),
    ("vllm.tokenizers", "cached_get_tokenizer"),
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_spec_decode_draft_probs"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_kv_cache"),
    ("vllm.model_executor.layers.fused_moe.expert_map_manager", "ExpertMapManager.get_local_expert_ids"),
    ("vllm.model_executor.layers.fused_moe.expert_map_manager", "ExpertMapManager.map_global_to_local"),
    ("vllm.model_executor.layers.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.BATCHED_TRITON"),
    ("vllm.model_executor.layers.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.CPU"),
    ("vllm.model_executor.layers.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.TRITON"),
    ("vllm.model_executor.layers.fused_moe.oracle.unquantized", "backend_to_kernel_cls"),
    ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts.expert_map"),
    ("vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter._compute_routing"),
    ("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    ("vllm.model_executor.layers.layernorm", "RMSNorm"),
    ("vllm.model_executor.layers.linear", "LinearBase"),
    ("vllm.model_executor.layers.linear", "ReplicatedLinear"),
    ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod"),
    ("vllm.model_executor.layers.linear", "QKVParallelLinear"),
    ("vllm.model_executor.layers.linear", "MergedColumnParallelLinear"),
    ("vllm.model_executor.layers.linear", "ColumnParallelLinear"),
    ("vllm.model_executor.layers.linear", "RowParallelLinear"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
)
# (module, dotted attribute) used only on a CPU
CPU_ATTRIBUTES: tuple[tuple[str, str], ...] = (
    ("vllm.triton_utils.dispatcher", "register_kernels"),
    ("vllm.v1.sample.sampler", "batched_count_greater_than"),
    ("vllm.model_executor.layers.fused_moe.activation", "MoEActivation.SILU"),
    ("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts._supports_grouped_gemm"),
    ("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts.apply"),
    ("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts.process_weights_after_loading"),
    ("vllm.distributed.device_communicators.cpu_communicator", "_CPUSHMDistributed.make_group_name"),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"),
)

# functions that this package replaces or reimplements: a release with another body needs a review
REPLACED: tuple[tuple[str, str], ...] = (
    ("vllm.config.compilation", "CompilationConfig.resolve_cudagraph_mode_and_sizes"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    ("vllm.v1.engine.output_processor", "RequestState.make_request_output"),
    ("vllm.v1.sample.rejection_sampler", "apply_sampling_constraints"),
    ("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_native"),
    ("vllm.v1.sample.ops.topk_topp_sampler", "random_sample"),
    ("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens"),
    ("vllm.v1.sample.rejection_sampler", "rejection_sample"),
    ("vllm.v1.spec_decode.eagle", "EagleProposer._sample_draft_tokens"),
    ("vllm.v1.spec_decode.eagle", "EagleProposer.propose"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._calc_spec_decode_metadata"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._dummy_run"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._input_fits_in_drafter"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._prepare_inputs"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.propose_draft_token_ids"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.take_draft_token_ids"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.sample_tokens"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.take_draft_token_ids"),
    ("vllm.v1.worker.gpu.spec_decode", "init_speculator"),
    ("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils", "get_eagle3_aux_layers_from_config"),
    ("vllm.v1.worker.gpu.spec_decode.eagle.speculator", "EagleSpeculator.propose"),
    ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler.__call__"),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator._copy_request_inputs"),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator.load_model"),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator.sample_draft"),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator.propose"),
    ("vllm.v1.worker.gpu_worker", "Worker.sleep"),
    ("vllm.v1.worker.gpu_worker", "Worker.wake_up"),
)


def check_version(version: str | None) -> None:
    """Raise RunError unless ``version`` is a supported release, e.g. ``0.32.0+cpu``; None: vLLM is not installed."""
    if version is None:
        raise RunError(f"vllm is not installed; rollout needs release {SUPPORTED_RELEASES}")
    if not version.startswith(_VLLM.series):
        raise RunError(f"vllm {version} is installed; rollout needs release {SUPPORTED_RELEASES}")


def missing_attributes(required: tuple[tuple[str, str], ...]) -> list[str]:
    """``module.attribute`` of each required part that the installed vLLM lacks (imports vLLM: seconds)."""
    missing = []
    for module_name, attribute in required:
        try:
            reduce(getattr, attribute.split("."), importlib.import_module(module_name))
        except (ImportError, AttributeError):
            missing.append(f"{module_name}.{attribute}")
    return missing


def check_vllm() -> str:
    """Check release and interface; returns the version.

    Raises:
        RunError: vLLM is not installed, unsupported, or lacks an attribute; the message names it.
    """
    version = installed_version(_VLLM.distributions)
    check_version(version)
    assert version is not None
    from vllm.platforms import current_platform

    required = REQUIRED_ATTRIBUTES + REPLACED + (CPU_ATTRIBUTES if current_platform.is_cpu() else ())
    if missing := missing_attributes(required):
        raise RunError(
            f"vllm {version} lacks {', '.join(missing)}, which rollout uses; supported: {SUPPORTED_RELEASES}"
        )
    return version
