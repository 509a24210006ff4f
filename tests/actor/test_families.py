"""Every family computes what transformers computes, in one process and split over four, and its weights come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import FAMILIES, family_of
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import FAMILY_MODELS, build_family, family_config, response_log_probs

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "families.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILY_MODELS:
        build_family(name, root / name)
    return root


@pytest.mark.parametrize("processes", [1, 4])
def test_log_probs_equal_transformers_and_weights_come_back(root: Path, processes: int, tmp_path: Path) -> None:
    from tests.actor.workers.layouts import TEMPERATURE, samples

    run_torchrun(WORKER, processes, [str(root), str(tmp_path / "rows.json")], timeout_s=300)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert set(rows) == set(FAMILY_MODELS)
    for name, row in rows.items():
        model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
        for sample, found in zip(samples(), row["log_probs"], strict=True):
            expected = response_log_probs(model, sample.token_ids, sample.prompt_length, TEMPERATURE)
            assert found == pytest.approx(expected, abs=2e-5), name
        assert row["roundtrip_bit_equal"], name


def test_the_tested_models_are_of_all_families() -> None:
    assert {model_type for model_type, _ in FAMILY_MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (family_config("gpt2"), "architecture 'gpt2'; allowed: qwen2, qwen3, llama, mistral"),
        (family_config("mistral", sliding_window=32), "sliding_window is 32; allowed: None"),
        (family_config("llama", attention_bias=True), "attention_bias is True; allowed: False"),
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
