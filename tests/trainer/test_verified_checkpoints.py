"""Checkpoints that are verified in the background: silence while they are intact, one warning for damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "verified.py"


def test_damage_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    model = build_qwen2(tmp_path / "model", num_kv_heads=2, scale=0.1)
    run_torchrun(WORKER, 2, [str(model), str(tmp_path)], timeout_s=300)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["plain"] == ["checkpoint/background_s"]
    assert rows["intact"] == ""
    (warning,) = rows["damaged"].splitlines()
    assert warning.startswith("warning: a published checkpoint is damaged: ")
    assert str(tmp_path / "checkpoints" / "step_000003" / "state.json") in warning
    assert rows["next"] == rows["damaged"] and rows["metrics"]["checkpoint/verified"] == 1.0
    assert rows["left"] == ["latest", "step_000003", "step_000004"]
