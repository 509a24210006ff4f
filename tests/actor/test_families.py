"""Every family computes what transformers computes, in one process and split over four, and its weights come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.families import LAYOUTS, measure
from megatron_tlt.bench.tiny_models import TINY_MODELS, family_config, write_tiny_model
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import FAMILIES, family_of

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in TINY_MODELS:
        write_tiny_model(name, root / name)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers_and_weights_come_back(root: Path, layout: str) -> None:
    rows = measure(root, layout, timeout_s=300)
    assert set(rows) == set(TINY_MODELS)
    for name, row in rows.items():
        assert row["logits"] <= 1e-5, name
        assert row["roundtrip_bit_equal"], name


def test_the_tested_models_are_of_all_families() -> None:
    assert {model_type for model_type, _ in TINY_MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (family_config("gpt2"), "architecture 'gpt2'; allowed: qwen2, qwen3, qwen3_moe, llama, mistral, mixtral"),
        (family_config("mistral", sliding_window=32), "sliding_window is 32; allowed: None"),
        (family_config("llama", attention_bias=True), "attention_bias is True; allowed: False"),
        (family_config("qwen3_moe", mlp_only_layers=[1]), "mlp_only_layers is [1]; allowed: [], None"),
        (
            family_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type is 'dynamic'; allowed: 'default', 'linear', 'llama3'",
        ),
    ],
)
def test_what_the_actor_lacks_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        family_of(config, "here")
    assert str(error.value).startswith("here: ") and message in str(error.value)
