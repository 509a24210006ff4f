"""A policy whose memory was given up between its steps goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import run_python
from tests.helpers.tiny_models import build_qwen2


@pytest.mark.distributed
def test_steps_are_the_same_with_memory_given_up_in_between(tmp_path: Path) -> None:
    model = build_qwen2(tmp_path / "model", num_heads=2, num_kv_heads=2)
    log = run_python(Path(__file__).parent / "workers" / "offload.py", [str(model)])
    for case in ("float32", "bf16", "float32, whole tensors", "bf16, whole tensors"):
        assert f"{case}: same" in log, case
