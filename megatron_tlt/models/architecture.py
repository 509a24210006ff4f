"""The sizes in a ``config.json``; avoids importing transformers, which takes seconds, if they are complete."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_tlt.config.model import RECIPE_ARCHITECTURE, architecture_file
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import FAMILIES, family_of
from megatron_tlt.models.family import Family

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


def read_sizes(file: Path, where: str) -> Any:
    """Reads the sizes that ``WeightMap`` needs from a ``config.json``, as attributes with Hugging Face's names.

    Raises:
        ConfigError: it is unreadable, or of an unsupported architecture; names ``where`` as the source.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    family = FAMILIES.get(values.get("model_type", "")) if isinstance(values, dict) else None
    if family is None or not _says_all(values, family):
        # Only transformers knows the defaults of a family's config and older forms of its keys.
        from megatron_tlt.models.hf_folder import read_architecture

        return read_architecture(file, where)
    sizes = SimpleNamespace(**{"rope_parameters": values.get("rope_scaling"), **values})
    if family.experts:
        sizes.num_local_experts = values.get("num_experts") or values["num_local_experts"]
    family_of(sizes, where)
    return sizes


def _says_all(values: dict[str, Any], family: Family) -> bool:
    needed = [*_SIZES, *([family.experts.width] if family.experts else [])]
    if family.model_type != "qwen2":  # its head size is always hidden size over heads
        needed.append("head_dim")
    experts = not family.experts or values.get("num_experts") or values.get("num_local_experts")
    scaling = values.get("rope_scaling")
    known = not scaling or (isinstance(scaling, dict) and "rope_type" in scaling)
    return all(values.get(key) is not None for key in needed) and bool(experts) and known


def sizes_of(config: TltConfig) -> tuple[Any, str]:
    """The sizes of a launch config's model and their source; needs neither weights nor the model's folder.

    Raises:
        ConfigError: there is no description of the model, or ``read_sizes`` fails.
    """
    file, recipe = architecture_file(config), config.model.recipe
    if file is not None:
        return read_sizes(file, str(file)), str(file)
    assert recipe is not None
    sizes = recipe.architecture.model_dump()
    return SimpleNamespace(model_type="qwen2", vocab_size=recipe.tokenizer.vocab_size, **sizes), RECIPE_ARCHITECTURE
