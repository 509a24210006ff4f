"""Weights between Hugging Face's names and Megatron's, through mbridge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mbridge.models.qwen2 import Qwen2Bridge
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import FAMILIES, family_of, rope_parameters

_LOCAL_NORMS = {
    "input_layernorm.weight": "model.layers.{layer_number}.input_layernorm.weight",
    "pre_mlp_layernorm.weight": "model.layers.{layer_number}.post_attention_layernorm.weight",
}


class DenseBridge(Qwen2Bridge):
    """mbridge's mapping of dense decoders, widened by the names of the local layer spec, with its own copy of tables.

    mbridge assumes Transformer Engine's fused norm + linear, whose norm weights carry other names. The names of all
    families in ``models.families`` are Qwen2's; those that a family lacks do not occur.
    """

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype, overrides: dict[str, Any]) -> None:
        # mbridge edits this table in place for tied embeddings: without a copy, for every later model too.
        self._DIRECT_MAPPING = dict(Qwen2Bridge._DIRECT_MAPPING)
        self._overrides = overrides
        super().__init__(hf_config, dtype=dtype)

    def _build_config(self) -> Any:
        family = FAMILIES[self.hf_config.model_type]
        return self._build_base_config(
            add_qkv_bias=family.qkv_bias, qk_layernorm=family.qk_layernorm, **self._overrides
        )

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
    family_of(config, str(folder))
    return config


def scale_rotary(hf_config: PretrainedConfig, chunk: GPTModel) -> None:
    """Gives a chunk the rotary frequencies that transformers computes, where the model scales them."""
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


def export_weights(bridge: Qwen2Bridge, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, whole, on every rank; a collective over the model-parallel group."""
    with torch.no_grad():
        for name, tensor in bridge.export_weights(chunks):
            yield name, tensor.detach()
