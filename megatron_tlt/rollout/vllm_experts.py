"""Mixtures of experts in vLLM: keeps their weights plain and locates each expert's projections in them.

A layer's local experts are two parameters: ``w13_weight`` (experts, gate rows then up rows, hidden) and ``w2_weight``
(experts, hidden, width). Some of vLLM's kernels use this layout. Others swap, shuffle or pack the weights after
loading; a later write or read by expert name would then access the wrong values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.types import ShardSlice

# vLLM's UnquantizedMoeBackend members that keep the layout, with the value of rollout.vllm.moe_backend for each.
# vLLM also chooses Triton itself on Hopper. FLASHINFER_CUTLASS swaps gate and up, FLASHINFER_TRTLLM and AITER shuffle
# into blocks, MOONEP separates the up projection, XPU transposes.
PLAIN_BACKENDS = {"TRITON": "triton", "BATCHED_TRITON": "batched_triton"}


@contextmanager
def plain_cpu_experts() -> Iterator[None]:
    """Make CPU builds of vLLM use a mixture-of-experts kernel with plain weights within the context."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from megatron_tlt.rollout.vllm_cpu_experts import PlainCpuExperts

    upstream = unquantized.backend_to_kernel_cls

    def kernels(backend: Any) -> list[Any]:
        return [PlainCpuExperts] if backend == unquantized.UnquantizedMoeBackend.CPU else upstream(backend)

    unquantized.backend_to_kernel_cls = kernels
    try:
        yield
    finally:
        unquantized.backend_to_kernel_cls = upstream


def check_experts(model: torch.nn.Module) -> None:
    """Raise ConfigError if a layer's experts are quantised, replicated, padded, or in a kernel's own layout."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for prefix, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            _check_layer(prefix, layer)


def _check_layer(prefix: str, layer: Any) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method, config = layer.quant_method, layer.moe_config
    if not isinstance(method, UnquantizedFusedMoEMethod):
        raise ConfigError(f"{prefix}: vLLM quantises its experts ({type(method).__name__}); allowed: none quantised")
    if config.moe_parallel_config.enable_eplb or config.num_experts != config.num_logical_experts:
        raise ConfigError("rollout.vllm.enable_eplb: found true, which moves experts between ranks; allowed: false")
    backend = method.unquantized_backend.name
    if backend not in PLAIN_BACKENDS and not getattr(method.experts_cls, "takes_plain_weights", False):
        raise ConfigError(
            f"rollout.vllm.moe_backend: vLLM chose {backend}, which rearranges the weights of {prefix} so that they "
            f"cannot be written in place; allowed: {', '.join(PLAIN_BACKENDS.values())}"
        )
    width, hidden = config.intermediate_size_per_partition, config.hidden_dim
    wanted = {"w13_weight": (2 * width, hidden), "w2_weight": (hidden, width)}
    found = {kind: tuple(param.shape[1:]) for kind, param in layer.named_parameters(recurse=False)}
    unpadded = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    if found != wanted or unpadded != (width, hidden):
        raise ConfigError(
            f"{prefix}: vLLM's kernel {backend} holds parameters {found}; allowed: {wanted}, with a width of "
            f"{unpadded[0]} and a hidden size of {unpadded[1]} (no biases, no padding)"
        )


def expert_weights(prefix: str, layer: Any) -> Iterator[tuple[str, torch.Tensor, ShardSlice | None]]:
    """Yield (Hugging Face name, view, slice or None) of each local expert's gate, up and down projection.

    Without expert parallelism a rank holds a slice of every expert, along its width. With it, a rank holds the full
    experts that vLLM's expert map assigns to it.

    Raises:
        RunError: a parameter is not an expert's weight.
    """
    parallel = layer.moe_config.moe_parallel_config
    width = layer.moe_config.intermediate_size_per_partition
    # (parameter, its first row, sharded dimension)
    places = {
        layer.ckpt_gate_proj_name: ("w13_weight", 0, 0),
        layer.ckpt_up_proj_name: ("w13_weight", width, 0),
        layer.ckpt_down_proj_name: ("w2_weight", 0, 1),
    }
    params = dict(layer.named_parameters(recurse=False))
    if unknown := sorted(params.keys() - {"w13_weight", "w2_weight"}):
        raise RunError(f"vLLM's {prefix}.{unknown[0]} is not an expert's weight; it cannot be read back")
    experts = prefix.removesuffix(".routed_experts")
    start = parallel.tp_rank * width
    for expert in layer.expert_map_manager.get_local_expert_ids():
        local = layer.expert_map_manager.map_global_to_local(expert)
        for projection, (kind, offset, dim) in places.items():
            view = params[kind].data[local].narrow(dim, offset, width)
            shard = ShardSlice(dim, start, width) if parallel.tp_size > 1 else None
            yield f"{experts}.{expert}.{projection}.weight", view, shard
