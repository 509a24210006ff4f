"""The benchmark of a real policy: what follows from measurements, and that they are not mixed with others'."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench import real
from megatron_tlt.bench.rollout import ABLE
from megatron_tlt.bench.rollout_cases import Case
from megatron_tlt.bench.rollout_oracle import RateTable
from megatron_tlt.bench.workers.real import ceiling
from megatron_tlt.cli import main
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.benchmark import BenchmarkResult
from megatron_tlt.rollout.types import Request, SamplingSpec, StepRecord
from megatron_tlt.speculation.strategy import OFF, Strategy

SUFFIX = Strategy("suffix", 5)


def case(batch: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Measurements of a batch; entry 0 of each arm's seconds is the first round's."""
    rows = [
        {
            "case": f"batch {batch}",
            "arm": arm,
            "repeat": i,
            "seconds": value,
            "acceptance_length": 2.0,
            "tokens": 100,
        }
        for arm, values in seconds.items()
        for i, value in enumerate(values)
    ]
    return {"case": f"batch {batch}", "head": "eagle3", "ceiling": 3.0, "rows": rows}


SECONDS = {
    "off": [9.0, 10.0, 10.0, 10.0, 12.0],
    ABLE: [9.0, 10.0, 10.0, 11.0, 12.0],
    "beg_mab": [9.0, 4.0, 5.0, 4.0, 5.0],
    "suffix-5": [9.0, 6.0, 6.0, 6.0],
    "oracle": [9.0, 3.8, 4.0, 4.2],
    "vLLM's ngram-5": [9.0, 5.0, 5.0, 5.0],
}


def test_targets_follow_from_medians_and_what_is_missing_is_incomplete() -> None:
    result = real.judge({"batch 4": case(4, SECONDS)}, [4, 8], [8])
    speed = result.targets["speed over off, batch 4"]
    assert (speed["value"], speed["target"], speed["met"]) == (pytest.approx(10.0 / 4.5), 2.3, False)
    assert result.targets["speed over off, lowest"]["value"] == pytest.approx(10.0 / 4.5)
    assert result.targets["speed over the oracle, lowest"]["value"] == pytest.approx(1.0)  # of the shared repeats
    assert result.targets["speed over the best of vLLM's own, lowest"]["value"] == pytest.approx(5.0 / 4.0)
    overhead = result.targets["time able to draft over unable, median of batches"]
    assert (overhead["value"], overhead["met"]) == (pytest.approx(10.5 / 10.0), False)
    for missing in ("batch 8", "batch 8, uniform"):
        assert result.targets[missing]["op"] == "incomplete" and not result.targets[missing]["met"]
    assert {row["arm"] for row in result.rows} == set(SECONDS)
    assert [row["ceiling"] for row in result.rows if row["arm"] == "beg_mab"] == [3.0]


def steps(arm: str, seconds: float, **more: float) -> list[dict[str, Any]]:
    row = {"arm": arm, "reward/mean": 0.5, "rollout/tokens_per_s": 100.0, "speculation/acceptance_length": 2.0, **more}
    times = {"time/total": seconds, "time/rollout": seconds / 2}
    return [{**row, **{key: value * (9 if i < 2 else 1) for key, value in times.items()}, "round": i} for i in range(4)]


def test_rl_steps_are_compared_once_they_have_settled() -> None:
    spot = {"idle_s": 2.0, "used_s": 1.8, "sessions": 1.0, "preempt_ms": 20.0, "failed": 0.0, "cut_off": 0.0}
    trained = steps(real.IN_BUBBLE, 8.0, **{f"spot/{key}": value for key, value in spot.items()})
    rows = steps("off", 12.0) + steps("trained after the update", 10.0) + trained
    done = {real.STEPS: {"case": real.STEPS, "steps": rows, "pairs": [], "pinned": True}}
    result = real.judge(done, [], rounds=4)
    off, after, bubble = result.rows
    assert (off["step_s"], off["tokens"], off["reward"]) == (12.0, 600.0, 0.5)
    assert after["speed_over_off"]["ratio"] == pytest.approx(1.2) and "bubbles" not in after
    assert bubble["speed_over_off"]["ratio"] == pytest.approx(1.5)
    assert result.targets["share of idle time that trains"] == {"value": 0.9, "target": 0.8, "op": ">=", "met": True}
    assert real.judge({}, [], rounds=4).targets[real.STEPS]["op"] == "incomplete"
    assert real.judge({}, []).targets == {}


def test_measurements_under_other_settings_are_refused(tmp_path: Path) -> None:
    record = tmp_path / "F.runs.jsonl"
    assert real._done(record, {"seed": 1}) == {}
    with record.open("a") as file:
        file.write(json.dumps(case(4, SECONDS)) + "\n")
    assert list(real._done(record, {"seed": 1})) == ["batch 4"]
    with pytest.raises(ConfigError, match=r"F\.runs\.jsonl: measured under other settings"):
        real._done(record, {"seed": 2})


def step(strategy: Strategy, running: int, num_tokens: int) -> StepRecord:
    return StepRecord(0.0, 1.0, running, num_tokens, 0, 0, strategy=strategy, next_strategy=strategy)


def test_the_ceiling_takes_the_best_strategy_at_each_batch() -> None:
    table = RateTable()
    for strategy, batch, tokens in ((OFF, 1, 1), (OFF, 2, 2), (SUFFIX, 1, 3), (SUFFIX, 2, 1)):
        table.add(step(strategy, batch, tokens))
    requests = tuple(
        Request(str(i), (1,), SamplingSpec(max_tokens=length, min_tokens=length), i)
        for i, length in enumerate((10, 40))
    )
    # 10 steps of two, then 30 of one, which the suffix tree ends in 10
    assert ceiling(table, Case(2, (requests,)), [OFF, SUFFIX]) == pytest.approx(40 / 20)


def test_defaults_are_those_of_the_shipped_config() -> None:
    parser = argparse.ArgumentParser()
    real.add_arguments(parser)
    arguments = parser.parse_args([])
    assert arguments.config.is_file() and sorted(arguments.batches) == [1, 2, 4, 8, 16, 32]


def test_the_command_says_where_measurements_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> BenchmarkResult:
        seen.append(arguments)
        return BenchmarkResult(environment={}, name="real")

    monkeypatch.setattr(real, "run", run)
    assert main(["bench", "real", "--json", str(tmp_path / "F"), "--minutes", "1"]) == 0
    assert (seen[0].json, seen[0].minutes) == (tmp_path / "F", 1.0)
