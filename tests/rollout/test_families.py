"""The engines take the weights of every family that the actor trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.models.tiny import TINY_MODELS, write_tiny_model
from tests.helpers.launch import run_python

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "families.py"


def test_engines_hold_and_run_the_weights_of_every_family(tmp_path: Path) -> None:
    for name in TINY_MODELS:
        write_tiny_model(name, tmp_path / name, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    log = run_python(WORKER, [str(tmp_path)], timeout_s=240)
    assert {line.split()[1] for line in log.splitlines() if line.startswith("same:")} == set(TINY_MODELS)
