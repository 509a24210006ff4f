"""A run that an earlier release wrote goes on under this one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from megatron_tlt.observe.metrics import read_metrics
from tests.helpers.launch import REPOSITORY, python, run_logged

pytestmark = pytest.mark.distributed
FIXTURE = REPOSITORY / "tests" / "fixtures" / "run_of_release_0"


def test_a_run_of_release_0_goes_on(tmp_path: Path) -> None:
    run = shutil.copytree(FIXTURE / "run", tmp_path / "run")
    before = read_metrics(run / "metrics.jsonl")
    assert yaml.safe_load((run / "config.resolved.yaml").read_text())["trainer"]["steps"] == 2
    entry = "import sys; from megatron_tlt.cli import main; sys.exit(main())"
    arguments = [str(FIXTURE.relative_to(REPOSITORY) / "config.yaml"), f"run.dir={run}", "trainer.steps=3"]
    said = run_logged([python(), "-c", entry, "train", *arguments], timeout_s=600)
    assert "step 3/3" in said and "step 1/3" not in said and "step 2/3" not in said
    after = read_metrics(run / "metrics.jsonl")
    assert after[: len(before) - 1] == before[:-1]
    assert [row["step"] for row in after] == [0, 1, 2, 3]
    assert yaml.safe_load((run / "config.resolved.yaml").read_text())["config_version"] >= 0
