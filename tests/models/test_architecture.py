"""Sizes read without transformers are those that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.tiny_models import TINY_MODELS, family_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.architecture import read_sizes
from megatron_tlt.models.hf_folder import read_architecture
from megatron_tlt.models.weight_map import WeightMap
from tests.helpers.launch import REPOSITORY


def same(file: Path) -> bool:
    """Compares the two ways, and says whether the quick one was taken."""
    quick, full = read_sizes(file, "model"), read_architecture(file, "model")
    assert WeightMap(quick).shapes == WeightMap(full).shapes
    assert WeightMap(quick).parameters == WeightMap(full).parameters
    return type(quick) is not type(full)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_sizes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, own = TINY_MODELS[name]
    config = family_config(model_type, **{**own, "vocab_size": 70})
    file = tmp_path / "any-name.json"
    config.to_json_file(file, use_diff=False)
    same(file)
    written: dict[str, Any] = json.loads(file.read_text())
    for key in ("tie_word_embeddings", "head_dim", "num_experts", "num_local_experts"):
        file.write_text(json.dumps({k: v for k, v in written.items() if k != key}))
        same(file)  # a default of the family's


def test_the_shipped_description_needs_no_transformers() -> None:
    assert same(REPOSITORY / "launch" / "architectures" / "qwen2.5-32b.json")


def test_what_cannot_be_read_or_is_unknown_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(ConfigError, match=r"a\.json: cannot be read"):
        read_sizes(file, "a")
    file.write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="architecture 'gpt2'"):
        read_sizes(file, "a")
    shipped = json.loads((REPOSITORY / "launch" / "architectures" / "qwen2.5-32b.json").read_text())
    file.write_text(json.dumps({**shipped, "hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="hidden_act is 'gelu'"):
        read_sizes(file, "a")
