"""Whole runs of the campaign of faults: what is done to them changes nothing of what they do."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_tlt.bench import faults
from tests.trainer.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_six_faults_of_whole_runs_change_nothing(runs: Runs, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    faults.add_arguments(parser)
    given = ["--components", "0", "--runs", "2", "--faults-per-run", "3", "--steps", "5", "--seed", "3"]
    given += ["--config", str(runs.config), "--folder", str(tmp_path), "--set", "trainer.prompts_per_step=4"]
    given += ["launcher.preload=true"]
    result = faults.run(parser.parse_args(given))
    assert result.all_met, (result.rows, result.targets)
    assert sum(row["faults"] for row in result.rows) == 6
