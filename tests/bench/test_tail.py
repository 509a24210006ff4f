"""How the benchmark of tail batching counts, and which lengths it gives."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_tlt.bench.recorded_lengths import LengthsByProblem
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tail import PERIOD, judge, of_periods, summarize
from megatron_tlt.rollout.types import Request, SamplingSpec


def rows(arm: str, rollout: float, rest: float, count: int = 2 * PERIOD + 2) -> list[dict[str, Any]]:
    common = {"length/mean": 20.0, "tail/long_round": 0.0, "tail/wasted": 0.25}
    times = {"time/rollout": rollout, "time/total": rollout + rest}
    return [{"arm": arm, "round": number, **common, **times} for number in range(count)]


def test_only_whole_periods_count() -> None:
    found = rows("off", 3.0, 1.0)
    found[-1]["time/total"] = 1e6
    assert of_periods(found, "off", "time/total") == [4.0 * PERIOD] * 2
    found[0]["time/total"] = 1e6
    off, both = summarize([*found, *rows("both", 1.5, 1.0)], settle=1, problems=10)
    assert off["step (ms per problem)"] == 400 and both["step (ms per problem)"] == 250
    assert both["rollout, off over it"]["ratio"] == 2 and both["step, off over it"]["ratio"] == pytest.approx(1.6)
    assert both["bound of the step"] == 4, "a rollout that takes no time"
    result = BenchmarkResult(environment={}, name="tail")
    result.rows = [off, both]
    judge(result)
    saved = result.targets["both: share of the saving that the bound allows"]
    assert saved["value"] == pytest.approx((1 - 1 / 1.6) / (1 - 1 / 4)) and not saved["met"]
    assert result.targets["rollout seconds per problem, off over both"]["met"]


def test_a_problem_keeps_its_kind_of_lengths_and_gets_others_in_another_rollout() -> None:
    lengths = LengthsByProblem(longest=0, seed=1)

    def of(problem: str) -> list[int]:
        requests = [Request(f"0-{i}", (1,), SamplingSpec(), 0, problem, i) for i in range(8)]
        return [lengths(request).sampling.max_tokens for request in requests]

    first = {f"p{i}": of(f"p{i}") for i in range(50)}
    assert first == {problem: of(problem) for problem in first}, "the same in every arm"
    lengths.begin(1)
    again = {problem: of(problem) for problem in first}
    assert again != first
    same = sum(bool(set(first[problem]) & set(again[problem])) for problem in first)
    assert same == 50, "of the same recorded problem"
