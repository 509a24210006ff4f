"""Random models of every family in a small size for benchmarks and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 64}),
    "llama": ("llama", {}),
    "llama-llama3-tied": ("llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3-moe-raw": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


def family_config(model_type: str, **options: Any) -> PretrainedConfig:
    """A family's config with a few thousand weights."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return AutoConfig.for_model(model_type, **{**sizes, **options})


def write_tiny_model(name: str, folder: Path, **options: Any) -> Path:
    """Writes a random model of ``TINY_MODELS`` in float32."""
    model_type, own = TINY_MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = family_config(model_type, **{**own, **options})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.uniform_(0.5, 1.5) if "norm" in parameter_name else parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder
