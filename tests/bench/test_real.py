"""The benchmark of a real policy: what follows from measurements, and that they are not mixed with others'."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_tlt.bench import real
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.rollout import ABLE
from megatron_tlt.bench.rollout_cases import make_groups
from megatron_tlt.bench.rollout_oracle import RateTable
from megatron_tlt.bench.workers.real import ceiling, natural
from megatron_tlt.cli import main
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy

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
    enough = {arm: values * 3 for arm, values in SECONDS.items()} | {"vLLM's suffix-5": [9.0, 5.0, 5.0, 5.0]}
    whole = real.judge({"batch 4": case(4, enough)}, [4])
    assert whole.targets["speed over off, lowest"]["met"] and not any("arctic" in name for name in whole.targets)
    speed = result.targets["speed over off, batch 4"]
    # repeats have problems of their own, so ratios are of pairs: 10/4, 10/5, 10/4, 12/5
    assert (speed["value"], speed["target"], speed["met"]) == (pytest.approx(2.45), 2.3, True)
    assert result.targets["speed over the oracle, lowest"]["value"] == pytest.approx(0.95)  # of the shared repeats
    assert result.targets["speed over the best of vLLM's own, lowest"]["value"] == pytest.approx(5.0 / 4.0)
    overhead = result.targets["time able to draft over unable, median of batches"]
    assert (overhead["value"], overhead["met"]) == (pytest.approx(1.0), True)
    # four pairs are too few to say "never slower", and one of vLLM's own drafters was not there
    assert result.targets["speed over off, lowest: at least 10 pairs"]["op"] == "incomplete"
    assert any("arctic-inference" in name for name, one in result.targets.items() if one["op"] == "incomplete")
    for missing in ("batch 8", "batch 8, uniform"):
        assert result.targets[missing]["op"] == "incomplete" and not result.targets[missing]["met"]
    assert {row["arm"] for row in result.rows} == set(SECONDS)
    assert [row["ceiling"] for row in result.rows if row["arm"] == "beg_mab"] == [3.0]


def steps(arm: str, seconds: float, **more: float) -> list[dict[str, Any]]:
    row = {
        "arm": arm,
        "reward/mean": 0.5,
        "rollout/tokens_per_s": 1200 / seconds,
        "speculation/acceptance_length": 2.0,
        **more,
    }
    times = {"time/total": seconds, "time/rollout": seconds / 2}
    return [{**row, **{key: value * (9 if i < 2 else 1) for key, value in times.items()}, "round": i} for i in range(4)]


def test_rl_steps_are_compared_once_they_have_settled() -> None:
    spot = {"idle_s": 2.0, "used_s": 1.8, "sessions": 1.0, "preempt_ms": 20.0, "failed": 0.0, "cut_off": 0.0}
    trained = steps(real.IN_BUBBLE, 8.0, **{f"spot/{key}": value for key, value in spot.items()})
    rows = steps("off", 12.0) + steps("trained after the update", 10.0) + trained
    done = {real.STEPS: {"case": real.STEPS, "steps": rows, "pairs": [], "pinned": True}}
    result = real.judge(done, [], rounds=4)
    shorter = [row | {"time/total": row["time/total"] / 2, "time/rollout": row["time/rollout"] / 2} for row in trained]
    halved = {real.STEPS: {**done[real.STEPS], "steps": [*rows[:8], *shorter]}}
    # by the token: half as many in half of the time are no faster
    assert real.judge(halved, [], rounds=4).rows[2]["speed_over_off"] == result.rows[2]["speed_over_off"]
    off, after, bubble = result.rows
    assert (off["step_s"], off["tokens"], off["reward"]) == (12.0, 600.0, 0.5)
    assert after["rollout_speed_over_off"]["ratio"] == pytest.approx(1.2)
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
    with pytest.raises(ConfigError, match=r"F\.runs\.jsonl: measured with other settings"):
        real._done(record, {"seed": 2})


def test_policies_that_differ_in_one_weight_have_heads_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = {"model.norm.weight": torch.ones(8), "model.layers.0.mlp.up_proj.weight": torch.ones(8, 8)}
    save_file(weights, tmp_path / "model.safetensors")
    before = real._digest(tmp_path)
    assert real._digest(tmp_path) == before
    weights["model.layers.0.mlp.up_proj.weight"][3, 3] = 2.0
    save_file(weights, tmp_path / "model.safetensors")
    assert real._digest(tmp_path) != before


def step(strategy: Strategy, running: int, num_tokens: int) -> StepRecord:
    return StepRecord(strategy, running, 1.0, num_tokens)


def test_the_ceiling_takes_the_best_strategy_at_each_batch() -> None:
    table = RateTable()
    for strategy, batch, tokens in ((OFF, 1, 1), (OFF, 2, 2), (SUFFIX, 1, 3), (SUFFIX, 2, 1)):
        table.add(step(strategy, batch, tokens))
    # 10 steps of two, then 30 of one, which the suffix tree ends in 10
    assert ceiling(table, [[10, 40]], [OFF, SUFFIX]) == pytest.approx(40 / 20)


def test_every_rollout_has_problems_of_its_own_and_several_samples_of_each() -> None:
    pool = [
        Request(str(i), (1,), SamplingSpec(max_tokens=length, min_tokens=length), i)
        for i, length in enumerate(range(100, 36, -1))
    ]
    rollouts = make_groups(pool, 16, 8, 11)
    problems = [{request.problem_key for request in rollout} for rollout in rollouts]
    assert [len(rollout) for rollout in rollouts] == [16] * 11 and all(len(found) == 4 for found in problems)
    assert len(set.union(*problems)) == 44
    names = [(request.request_id, request.seed) for rollout in rollouts for request in rollout]
    assert len({name for name, _ in names}) == len({seed for _, seed in names}) == 176
    assert [len({request.problem_key for request in make_groups(pool, batch, 8, 1)[0]}) for batch in (1, 4, 32)] == [
        1,
        4,
        4,
    ]
    with pytest.raises(ConfigError, match="--requests is 64; allowed for 17 rollouts of 16: at least 68"):
        make_groups(pool, 16, 8, 17)


def test_a_request_ends_by_itself_where_its_length_is_asked_for() -> None:
    forced = Request("0", (1,), SamplingSpec(max_tokens=7, min_tokens=7), 0)
    assert natural(forced, 384).sampling == SamplingSpec(max_tokens=384, min_tokens=0)


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
