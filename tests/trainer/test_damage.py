"""Damages the newest of two real checkpoints, file by file: the previous one is used, loudly, or one error says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import run_python
from tests.helpers.tiny_models import build_qwen2

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "damage.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("damage")
    model = build_qwen2(folder / "model", num_kv_heads=2, scale=0.1)
    run_python(WORKER, [str(model), str(folder)])
    rows: dict[str, Any] = json.loads((folder / "rows.json").read_text())
    return rows


def test_every_kind_of_file_was_damaged(found: dict[str, Any]) -> None:
    from tests.trainer.workers.damage import FILES

    kinds = {Path(file).suffix or Path(file).name for file in FILES}
    assert {Path(file).suffix or Path(file).name for file in found["files"]} <= kinds
    assert set(FILES) <= set(found["files"])


def test_whole_checkpoints_resume_from_the_newest_in_silence(found: dict[str, Any]) -> None:
    first, *_, last = found["rows"]
    assert first["step"] == last["step"] == 2
    assert "warning: " not in first["said"] + last["said"]
    assert first["state"] == last["state"]


def test_the_previous_one_is_used_with_a_warning_that_names_the_damage(found: dict[str, Any]) -> None:
    whole, *rows = found["rows"]
    passed_over = [row for row in rows if "file" in row and not row["damage"].startswith("both")]
    assert len(passed_over) == 21
    for row in passed_over:
        assert row["step"] == 1, row
        assert "warning: checkpoint " in row["said"] and "step_000002 is not complete" in row["said"], row
        if (row["file"], row["damage"]) != ("manifest.json", "flip a bit"):  # it then contradicts another file
            assert row["file"] in row["said"], row
        assert row["state"] == passed_over[0]["state"] != whole["state"]


def test_with_none_left_one_error_says_so(found: dict[str, Any]) -> None:
    rows = [row for row in found["rows"] if row["damage"].startswith("both")]
    assert len(rows) == 3
    for row in rows:
        assert row["step"] is None and "no intact checkpoint" in row["error"]
        assert "\n" not in row["error"]
        assert "step_000001" in row["said"] and "step_000002" in row["said"]
