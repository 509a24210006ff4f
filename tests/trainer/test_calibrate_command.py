"""``tlt calibrate`` on a real policy, and a run on the mixture that follows from it."""

from __future__ import annotations

import json

import pytest

from megatron_tlt.tasks.pool import tier_of
from tests.helpers.launch import run_logged
from tests.trainer.conftest import Runs

pytestmark = pytest.mark.distributed

PARAMS = "{filters: [1], transforms: [0], aggregates: [count, max], numbers: {min: 2, max: 3, tail: 0}}"
TASKS = f"tasks=[{{kind: procedural, name: pipeline_counting, params: {PARAMS}%s}}]"


def test_the_policys_pass_rates_make_a_mixture(runs: Runs) -> None:
    out = runs.folder / "tiers.json"
    pool = f", budget: 4, tier_file: {out}, tier_mix: {{%s: 1}}"
    sizes = ("--problems", "24", "--samples", "4")
    # the file that the config names does not exist yet
    command = runs.command("calibrated", TASKS % (pool % "hard"), "--out", str(out), *sizes, command="calibrate")
    said = run_logged(command, timeout_s=600)
    assert f"pass rates: {out}" in said and "pipeline_counting: " in said
    found = json.loads(out.read_text())
    rows = found["tasks"]["pipeline_counting"]
    assert len(rows) == len({row["digest"] for row in rows}) == 24 and found["step"] == 0
    assert all(0 <= row["passed"] <= row["samples"] == 4 and row["tokens"] > 0 for row in rows)

    tiers = [tier_of(row["passed"] / 4) for row in rows]
    tier = max(tiers, key=tiers.count)
    runs.train("mixture", TASKS % (pool % tier), "trainer.steps=2")
    again = runs.command("calibrated", TASKS % "", "--out", str(out), "--samples", "0", command="calibrate")
    assert "--samples: found 0; allowed: 1 or more" in run_logged(again, timeout_s=600, expect_status=2)
