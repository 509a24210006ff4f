"""Weights between Hugging Face's names and Megatron's, through mbridge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mbridge.models.qwen2 import Qwen2Bridge
from transformers import AutoConfig, PretrainedConfig

from megatron_tlt.errors import ConfigError

SUPPORTED = ("qwen2",)

_LOCAL_NORMS = {
    "input_layernorm.weight": "model.layers.{layer_number}.input_layernorm.weight",
    "pre_mlp_layernorm.weight": "model.layers.{layer_number}.post_attention_layernorm.weight",
}


class Qwen2(Qwen2Bridge):
    """mbridge's Qwen2 mapping, widened by the names of the local layer spec, with its own copy of shared tables.

    mbridge assumes Transformer Engine's fused norm + linear, whose norm weights carry other names.
    """

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype, overrides: dict[str, Any]) -> None:
        # mbridge edits this table in place for tied embeddings: without a copy, for every later model too.
        self._DIRECT_MAPPING = dict(Qwen2Bridge._DIRECT_MAPPING)
        self._overrides = overrides
        super().__init__(hf_config, dtype=dtype)

    def _build_config(self) -> Any:
        return self._build_base_config(add_qkv_bias=True, qk_layernorm=False, **self._overrides)

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        for suffix, template in _LOCAL_NORMS.items():
            if mcore_weights_name.endswith("." + suffix):
                return [template.format(layer_number=mcore_weights_name.split(".")[2])]
        return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)


def read_hf_config(folder: Path) -> PretrainedConfig:
    """The architecture a Hugging Face folder describes.

    Raises:
        ConfigError: no such folder, no ``config.json``, or an architecture that is not supported.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: no config.json in {folder}; a Hugging Face model folder is needed")
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in SUPPORTED:
        raise ConfigError(f"{folder}: architecture {config.model_type!r}; allowed: {', '.join(SUPPORTED)}")
    return config


def rope_theta(hf_config: PretrainedConfig) -> float:
    """The rotary base, wherever the installed transformers keeps it."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", getattr(hf_config, "rope_theta", 10000.0)))


def export_weights(bridge: Qwen2Bridge, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, whole, on every rank; a collective over the model-parallel group."""
    with torch.no_grad():
        for name, tensor in bridge.export_weights(chunks):
            yield name, tensor.detach()
