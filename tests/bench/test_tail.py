"""How the benchmark of tail batching counts, and which lengths it gives."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_tlt.bench.recorded_lengths import RECORDED, LengthsByProblem, lengths_of_problems
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tail import (
    EVERYTHING,
    PERIOD,
    SCHEDULES,
    TAILS,
    add_simulated,
    judge,
    of_periods,
    parts_of,
    summarize,
)
from megatron_tlt.bench.tail_simulated import MeasuredEngine, simulated_seconds
from megatron_tlt.rollout.types import Request, SamplingSpec


def rows(arm: str, rollout: float, rest: float, count: int = 2 * PERIOD + 2) -> list[dict[str, Any]]:
    common = {"length/mean": 20.0, "tail/long_round": 0.0, "tail/wasted": 0.25}
    times = {"time/rollout": rollout, "time/total": rollout + rest}
    return [{"arm": arm, "round": number, **common, **times} for number in range(count)]


def test_an_arm_says_what_it_adds_to_which() -> None:
    assert parts_of("off") == ("off", ()) and parts_of("SD + spot") == ("SD + spot", ())
    assert parts_of("continued") == ("off", ("continued",)) and parts_of("SD + partial") == ("SD", ("partial",))
    assert parts_of(EVERYTHING) == ("SD + spot", ("both", "stream"))


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


def test_long_responses_are_scaled_to_what_the_model_can_write() -> None:
    problems = lengths_of_problems(320, "32k")
    lengths = sorted(length for one in problems for length in one)
    assert len(problems) == 512 and lengths[-1] == 320 and lengths[0] >= 1
    assert 30 < lengths[len(lengths) // 2] < 60, "the median of the law is a seventh of its longest"


GIVEN = {"prompts": 16, "group": 4, "longest": 0, "law": RECORDED, "seed": 1}


def test_a_line_through_measured_steps_gives_the_simulated_ones_their_time() -> None:
    steps = [{"batch": batch, "ms_per_step": 2.0 + 0.5 * batch, "steps": 3.0, "prefill": 0.0} for batch in (1, 4, 9)]
    steps.append({"batch": 4.0, "ms_per_step": 9.0, "steps": 2.0, "prefill": 1.0})
    engine = MeasuredEngine.fitted(steps, prompt_tokens=50.0)
    assert (engine.fixed_s, engine.request_s, engine.token_s) == pytest.approx((2e-3, 5e-4, 2 * 5e-3 / 50))

    def ratio(engine: MeasuredEngine, arm: str) -> float:
        seconds = simulated_seconds(engine, GIVEN, 2, 64, 20.0, TAILS.get(arm), SCHEDULES.get(arm))
        return simulated_seconds(engine, GIVEN, 2, 64, 20.0, None, None) / seconds

    free = MeasuredEngine(1e-3, 0.0, 0.0)
    off = simulated_seconds(free, GIVEN, 2, 64, 20.0, None, None)
    assert 0.05 < off < 0.33, "a step for each token of the longest response of 64"
    assert ratio(free, "both") > ratio(free, "problems") > 1
    assert ratio(free, "partial") > ratio(free, "one_step_off") > 1
    # where every token costs, those that are thrown away do too
    assert ratio(MeasuredEngine(0.0, 1e-3, 0.0), "both") < 1


def test_simulated_ratios_stand_beside_measured_ones() -> None:
    steps = [{"batch": b, "ms_per_step": 1.0, "steps": 1.0, "prefill": 0.0} for b in (1.0, 2.0)]
    off = [{**row, "length/prompt_mean": 20.0} for row in rows("off", 3.0, 1.0)]
    summary = summarize([*off, *rows("both", 1.5, 1.0), *rows("stream", 3.0, 0.5)], 1, 16)
    add_simulated(summary, {"engine_steps": steps, "steps": off, "most_requests": 64.0}, GIVEN, 2)
    result = BenchmarkResult(environment={}, name="tail")
    result.rows = summary
    judge(result)
    simulated = summary[1]["simulated, off over it"]
    assert summary[0]["simulated, off over it"] == 1 and "simulated, off over it" not in summary[2]
    target = result.targets["largest error of the simulated ratios"]
    assert target["value"] == pytest.approx(abs(simulated / 2 - 1)) and target["op"] == "<="
