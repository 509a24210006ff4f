"""A drafter's weights travel as the policy's do, with a version of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.eagle_heads import build_eagle_head
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2

WORKER = Path(__file__).parent / "workers" / "drafter.py"


@pytest.mark.distributed
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_a_newer_head_of_one_rank_reaches_every_engine(tmp_path: Path, engine_tp: int) -> None:
    model = build_qwen2(tmp_path / "model", num_kv_heads=2)
    old, new = (build_eagle_head("eagle", model, tmp_path / f"head{seed}", seed=seed) for seed in (1, 2))
    run_torchrun(WORKER, 2, [str(model), str(old), str(new), str(engine_tp), str(tmp_path)], timeout_s=200)
    for row in (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)):
        assert row["tokens"][0] == row["tokens"][1], "a drafter changed the responses"
        assert row["accepted"][0] != row["accepted"][1], "the newer head drafts what the older one did"
