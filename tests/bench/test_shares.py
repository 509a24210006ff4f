"""The benchmark of shares by speed: what it makes of what was measured, and the whole of it at its smallest size."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.shares import ARMS, judge, run, summarize
from megatron_tlt.cli import main
from megatron_tlt.errors import ConfigError


def measured(even: float, by_speed: float, slow: float) -> dict[str, Any]:
    steps = [
        {
            "arm": arm,
            "round": number,
            "time/total": seconds + 1.0,
            "time/rollout": seconds / 2,
            "time/log_probs": seconds / 8,
            "time/update": seconds / 8,
            "time/idle": 0.1,
        }
        for number in range(3)
        for arm, seconds in zip(ARMS, (even, by_speed), strict=True)
    ]
    steps[0]["time/total"] = 1e6  # a round that does not count
    return {"steps": steps, "work": [[1.0, slow]] * 3, "speeds": {"even": None, "by speed": [1.0, 0.5]}}


def test_ratios_are_of_the_counted_steps_and_their_divided_phases() -> None:
    rows = summarize(measured(5.0, 3.0, 2.1), settle=1)
    assert [row["step_s"] for row in rows] == [6.0, 4.0] and rows[0]["step, even over it"]["ratio"] == 1
    assert rows[1]["step, even over it"]["ratio"] == 1.5
    assert rows[1]["divided phases, even over it"]["ratio"] == pytest.approx(5 / 3)
    assert rows[1]["seconds"] == [4.0, 4.0] and rows[1]["speeds"] == [1.0, 0.5]
    result = BenchmarkResult(environment={}, name="shares")
    result.rows = rows
    judge(result, competitors=1)
    assert [target["met"] for target in result.targets.values()] == [True, True]
    assert result.targets["slow rank's slowness off what was meant, share"]["value"] == pytest.approx(0.05)


def test_a_rank_that_is_not_as_slow_as_meant_is_told() -> None:
    result = BenchmarkResult(environment={}, name="shares")
    result.rows = summarize(measured(5.0, 4.9, 1.5), settle=1)
    judge(result, competitors=1)
    assert [target["met"] for target in result.targets.values()] == [False, False]


def test_a_round_has_to_count() -> None:
    with pytest.raises(ConfigError, match="--rounds: found 2; allowed: more than --settle, 2"):
        run(argparse.Namespace(rounds=2, settle=2))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_of_both_arms_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "shares.json"
    sizes = ["--rounds", "2", "--settle", "1", "--prompts", "3", "--group", "2", "--longest", "16"]
    assert main(["bench", "shares", *sizes, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["environment"]["cores"] >= 1
    even, by_speed = found["rows"]
    assert (even["arm"], even["speeds"], by_speed["speeds"]) == ("even", None, [1.0, 0.5])
    for row in found["rows"]:
        assert min(row["step_s"], row["rollout_s"], row["log_probs_s"], row["update_s"]) > 0
        assert len(row["seconds"]) == 1 and row["step, even over it"]["ratio"] > 0
