"""Models that several tests split over processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``dense`` and ``moe``, a mixture of four experts."""
    root = tmp_path_factory.mktemp("models")
    build_qwen2(root / "dense", num_layers=4, num_heads=2, num_kv_heads=2, scale=0.1)
    write_tiny_model("qwen3-moe", root / "moe")
    return root


def rows_of(worker: Path, models: Path, out: Path, processes: int = 2, *names: str) -> dict[str, dict[str, Any]]:
    """What a worker on so many processes wrote to ``rows.json``; ``names``: of its cases, if it takes any."""
    run_torchrun(worker, processes, [str(models), str(out), *names], timeout_s=600)
    found: dict[str, dict[str, Any]] = json.loads((out / "rows.json").read_text())
    return found
