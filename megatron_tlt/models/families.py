"""The model families that the actor supports, one file each; pure, read from a Hugging Face config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.models import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from megatron_tlt.models.family import Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (qwen2, qwen3, qwen3_moe, llama, mistral, mixtral)}
"""Families by ``model_type`` of the Hugging Face config."""

# Types whose frequencies do not depend on the sequence and that have no attention factor.
ROPE_TYPES = ("default", "linear", "llama3")


def rope_parameters(hf_config: PretrainedConfig) -> dict[str, Any]:
    """``rope_type``, ``rope_theta`` and the type's own parameters."""
    found = dict(getattr(hf_config, "rope_parameters", None) or {})
    return {"rope_type": "default", "rope_theta": getattr(hf_config, "rope_theta", 10000.0), **found}


def head_dim(hf_config: PretrainedConfig) -> int:
    """The width of an attention head; by default hidden size over heads."""
    given = getattr(hf_config, "head_dim", None)
    return int(given or hf_config.hidden_size // hf_config.num_attention_heads)


def family_of(hf_config: PretrainedConfig, where: str) -> Family:
    """The family of a model; checks every option of its config that would change the mathematics.

    Raises:
        ConfigError: the actor does not support the architecture or an option; one line each, which names ``where``.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ConfigError(f"{where}: architecture {hf_config.model_type!r}; allowed: {', '.join(FAMILIES)}")
    options: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
        **family.options,
    }
    if not getattr(hf_config, "use_sliding_window", True):
        del options["sliding_window"]  # Qwen's config has a window that the model does not use
    wrong = [
        f"{where}: config.json: {name} is {value!r}; allowed: {', '.join(map(repr, allowed))}"
        for name, allowed in options.items()
        if (value := getattr(hf_config, name, allowed[0])) not in allowed
    ]
    rope_type = rope_parameters(hf_config)["rope_type"]
    if rope_type not in ROPE_TYPES:
        wrong.append(f"{where}: config.json: rope_type is {rope_type!r}; allowed: {', '.join(map(repr, ROPE_TYPES))}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return family
