"""Files of tiers before a run: which commands read them, and what is known without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.cli import main

CONFIG = Path(__file__).parents[2] / "launch" / "quickstart-cpu.yaml"
PARAMS = {"filters": [1], "transforms": [0], "numbers": {"min": 2, "max": 4, "tail": 0.0}}
TASK: dict[str, Any] = {"kind": "procedural", "name": "pipeline_counting", "params": PARAMS}


def overrides(tmp_path: Path, **values: Any) -> list[str]:
    """Of a config whose model is not built yet."""
    given = {"run.dir": str(tmp_path / "run"), "model.recipe.cache_dir": str(tmp_path / "models"), **values}
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def test_a_calibration_needs_no_file_of_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = TASK | {"budget": 4, "tier_file": str(tmp_path / "none.json"), "tier_mix": {"hard": 1}}
    given = overrides(tmp_path, tasks=[pool], **{"evaluation.sets": [{"name": "hard", "tasks": [pool]}]})
    assert main(["calibrate", str(CONFIG), "--out", str(tmp_path / "none" / "tiers.json"), *given]) == 2
    error = capsys.readouterr().err
    assert "--out: cannot write" in error and "tier_file" not in error, "checked after the config"
