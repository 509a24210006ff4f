"""A Megatron checkpoint from elsewhere cannot run code: its pickles are read without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from tests.helpers.launch import run_python

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "untrusted.py"


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    model = write_tiny_model("qwen2-tied", tmp_path / "model")
    run_python(WORKER, [str(model), str(tmp_path)])
    rows = json.loads((tmp_path / "found.json").read_text())
    assert {(row["case"], row["reader"]) for row in rows if row["ran"]} == set()
    said = {(row["case"], row["reader"]): row["said"] for row in rows}
    assert [said["untouched", reader] for reader in ("resume", "model.path", "convert")] == ["", "", ""]
    for reader in ("resume", "model.path", "convert"):
        assert ".metadata names posix.mkdir" in said["metadata", reader], said
    for reader in ("resume", "model.path"):  # a conversion reads no common.pt
        assert "common.pt: contains code" in said["common", reader]
        assert said["tensor", reader]
    assert "_extra_state/shard_0_2' contains code" in said["extra_state", "resume"]  # the others do not ask for it
    assert all("\n" not in text for text in said.values())
