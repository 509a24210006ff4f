"""The engines take the weights of every dense family that the actor trains, and refuse mixtures of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import FAMILIES
from megatron_tlt.models.tiny import TINY_MODELS, write_tiny_model
from megatron_tlt.rollout.vllm_setup import refuse_experts
from tests.helpers.launch import run_python

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "families.py"


DENSE = [name for name, (model_type, _) in TINY_MODELS.items() if FAMILIES[model_type].experts is None]


def test_engines_hold_and_run_the_weights_of_every_dense_family(tmp_path: Path) -> None:
    for name in DENSE:
        write_tiny_model(name, tmp_path / name, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    log = run_python(WORKER, [str(tmp_path)], timeout_s=240)
    assert {line.split()[1] for line in log.splitlines() if line.startswith("same:")} == set(DENSE)


def test_a_mixture_of_experts_is_refused_before_an_engine_is_built(tmp_path: Path) -> None:
    folder = write_tiny_model("qwen3-moe", tmp_path / "model")
    with pytest.raises(ConfigError, match="4 experts; allowed: a dense model"):
        refuse_experts(folder)
    refuse_experts(write_tiny_model("llama", tmp_path / "dense"))
