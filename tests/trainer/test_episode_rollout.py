"""Responses of several turns from a real engine and real environment processes."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from megatron_tlt.data.tokenizer_training import train_tokenizer
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2

WORKER = Path(__file__).parent / "workers" / "episodes.py"


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.distributed)],
)
def test_the_policys_tokens_are_what_the_environment_read(ranks: int, tmp_path: Path) -> None:
    folder = build_qwen2(tmp_path / "model", vocab_size=104, tie=False)
    train_tokenizer([string.ascii_letters], 104, folder)
    run_torchrun(WORKER, ranks, [str(folder), str(tmp_path)], timeout_s=300)
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert found["mixed"] and found["plain"]
    assert found["same"], "replayed without an environment, from a recording"
    rows = found["rows"]
    assert len(rows) == 40
    whole = [row for row in rows if row["turns"] == 3 and row["heard"]]
    assert len(whole) > 5 and {row["turns"] for row in rows} >= {1, 3}
    for row in rows:
        assert row["zeros"] and row["length"] <= 40
        assert row["count"] == (None if row["problem"] == 4 else row["own"]) and len(row["said"]) <= row["turns"]
    for row in whole:
        assert json.loads(row["heard"]) == row["said"] and row["value"] == 0.5
    assert all(row["turns"] == 1 and row["own"] == row["length"] for row in rows if row["problem"] == 4)
    assert (tmp_path / f"rank{ranks - 1}.json").exists()
