"""Files of tiers before a run: which commands read them, and what is known without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.cli import main
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.models.recipe import recipe_folder
from megatron_tlt.tasks import build_sources
from megatron_tlt.tasks.pool import digest_of
from megatron_tlt.tasks.sources import Split

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


def written_tiers(path: Path, task: dict[str, Any], split: Split, **changes: Any) -> str:
    """A file about the task's first problems, which are all hard, of seed 1."""
    source = build_sources([TaskConfig.model_validate(task)], split, 1).sources[0]
    rows = [{"index": i, "digest": digest_of(source.problem(i)), "passed": 0, "samples": 8} | changes for i in range(9)]
    path.write_text(json.dumps({"split": split, "tasks": {task["name"]: rows}}))
    return str(path)


def test_problems_of_tiers_are_not_compared_without_a_tokenizer_that_leaves_some_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = TASK | {"budget": 4, "tier_mix": {"hard": 1}}
    train = pool | {"tier_file": written_tiers(tmp_path / "train.json", TASK, "train", digest="of a longer one")}
    held_out = pool | {"tier_file": written_tiers(tmp_path / "held.json", TASK, "held_out", digest="of a longer one")}
    sets = [{"name": "hard", "problems": 4, "tasks": [held_out]}]
    given = overrides(tmp_path, tasks=[train], **{"evaluation.sets": sets, "rollout.filter_overlong_prompts": True})
    assert main(["config", str(CONFIG), *given]) == 0
    notes = capsys.readouterr().err
    for key in ("tasks[0]", "evaluation.sets[0].tasks[0]"):
        assert f"note: not checked: whether the problems of {key}.tier_file are the task's, because rollout" in notes
    assert main(["config", str(CONFIG), *given, "rollout.filter_overlong_prompts=false"]) == 2
    error = capsys.readouterr().err
    assert "tasks[0].tier_file: problem 0 of" in error and "evaluation.sets[0].tasks[0].tier_file: problem 0" in error
    assert "not checked: whether" not in error


def test_pass_rates_of_another_model_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written_tiers(tmp_path / "train.json", TASK, "train")
    given = overrides(tmp_path, tasks=[TASK | {"budget": 4, "tier_file": file, "tier_mix": {"hard": 1}}])
    found = json.loads(Path(file).read_text())
    for model, noted in (("/models/other", True), (str(recipe_folder(load_config(CONFIG, given))), False)):
        Path(file).write_text(json.dumps({**found, "model": model}))
        assert main(["config", str(CONFIG), *given]) == 0
        said = f"note: tasks[0].tier_file: the pass rates in {file} are those of {model}, not of "
        assert (said in capsys.readouterr().err) == noted
