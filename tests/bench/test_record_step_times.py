"""The tool that records what `tlt bench tuner` replays, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launch import REPOSITORY, run_python


@pytest.mark.slow
def test_steps_of_every_strategy_and_batch_are_recorded(tmp_path: Path) -> None:
    small = ["--hidden", "64", "--layers", "1", "--batches", "1", "2", "--drafts", "1", "--drafters", "ngram"]
    arguments = ["--out", str(tmp_path / "steps.json"), *small, "--steps", "2", "--rounds", "1"]
    run_python(REPOSITORY / "tools" / "record_step_times.py", arguments, timeout_s=120)
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [(step["strategy"], step["batch"]) for step in steps] == [
        (name, batch) for name in ("ngram-1", "off") for batch in (1, 2)
    ]
    assert all(duration > 0 for step in steps for rollout in step["milliseconds"] for duration in rollout)
    assert any(step["milliseconds"][0] for step in steps)
