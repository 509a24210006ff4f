"""Megatron's TransformerConfig for a Hugging Face model and a launch config; process groups of the layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_tlt.config.layouts import Layout, problems
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import FAMILIES, head_dim, rope_parameters
from megatron_tlt.platform.device import current_device, device_timeout_s, world_size

_LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def initialize_parallel_state(megatron: dict[str, Any], seed: int) -> None:
    """Creates the process groups of ``actor.megatron``, once per process.

    Raises:
        ConfigError: the layout does not fit the world; lists every reason.
    """
    if found := problems(Layout.read(megatron, world_size()), None):
        raise ConfigError("\n".join(found))
    sizes = {key: megatron[key] for key in _LAYOUT_KEYS if key in megatron}
    if not parallel_state.model_parallel_is_initialized():
        # annotated as int minutes, but only converted to a timedelta
        timeout: Any = device_timeout_s() / 60
        parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=timeout)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def parallel_sizes() -> dict[str, int]:
    """The sizes of the parallel dimensions of this process's layout."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def _model_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    family = FAMILIES[hf_config.model_type]
    fields: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim(hf_config),
        "ffn_hidden_size": hf_config.intermediate_size,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_layernorm,
    }
    if family.experts:
        normalize = family.experts.normalize
        fields |= {
            "num_moe_experts": hf_config.num_local_experts,
            "moe_ffn_hidden_size": getattr(hf_config, family.experts.width),
            "moe_router_topk": hf_config.num_experts_per_tok,
            # A softmax over the selected experts' logits equals a softmax over all, renormalized to sum to 1.
            "moe_router_pre_softmax": normalize is not None and not getattr(hf_config, normalize),
            "moe_router_dtype": "fp32",
        }
    return fields


# Defaults that a launch config may override.
_DEFAULTS: dict[str, Any] = {
    "sequence_parallel": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    # Only the policy's gradient trains the router, unless load balancing is configured.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}


def transformer_config(hf_config: PretrainedConfig, actor: ActorConfig) -> TransformerConfig:
    """Combines the model's own fields, this project's defaults and ``actor.megatron``.

    Raises:
        ConfigError: Megatron-Core refuses the combination; includes its reason.
    """
    given = actor.megatron
    bf16 = bool(given.get("bf16", False))
    dtype = torch.bfloat16 if bf16 else torch.float32
    interleaved = given.get("virtual_pipeline_model_parallel_size") is not None
    fields = {
        **_model_fields(hf_config),
        **_DEFAULTS,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bf16,
        # Losses return a sum and a count: Megatron divides by the count over all micro-batches and ranks.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        # Two stages of an interleaved pipeline exchange two messages at once, which a batched call would mix up; on
        # gloo a batched call returns before its data has arrived.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": current_device().is_cuda and not interleaved,
        "moe_grouped_gemm": actor.transformer_impl == "transformer_engine",
        # On a CPU the compiled activation rounds otherwise; unfused RoPE is that of ``megatron_rotary``.
        "bias_activation_fusion": current_device().is_cuda,
        "apply_rope_fusion": current_device().is_cuda and actor.transformer_impl == "transformer_engine",
        **given,
    }
    try:
        return TransformerConfig(**fields)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"actor.megatron: Megatron-Core refuses it: {error}") from error


def scale_rotary(hf_config: PretrainedConfig, chunk: GPTModel) -> None:
    """Sets a chunk's rotary frequencies to those that transformers computes, if the model scales them.

    Raises:
        ConfigError: Megatron-Core's rotary embedding cannot express the scaling.
    """
    rope_type = rope_parameters(hf_config)["rope_type"]
    if rope_type == "default":
        return
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, device=None)
    if factor != 1.0:
        raise ConfigError(f"config.json: rope_type {rope_type!r} scales attention by {factor}; allowed: 1.0")
    own = chunk.rotary_pos_emb.inv_freq
    if own.shape != inv_freq.shape:
        raise ConfigError(f"config.json: {inv_freq.numel()} rotary frequencies; Megatron-Core has {own.numel()}")
    chunk.rotary_pos_emb.inv_freq = inv_freq.to(own)
