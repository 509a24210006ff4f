"""`tlt bench spot`: the lengths it replays, what it makes of what was measured, and the whole of it at a small size."""

from __future__ import annotations

import json
import statistics
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from megatron_tlt.bench.chain_model import chain_responses, write_chain_model
from megatron_tlt.bench.recorded_lengths import RecordedLengths
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.spot import judge, percentile, slow_down, summarize
from megatron_tlt.cli import main
from megatron_tlt.rollout.types import Request, SamplingSpec


def flat(lengths: list[list[int]]) -> list[int]:
    """The longest first."""
    return sorted(chain.from_iterable(lengths), reverse=True)


@given(st.integers(1, 64), st.integers(1, 8), st.sampled_from([0, 16, 640]), st.integers(0, 30))
def test_any_number_of_responses_keeps_the_recorded_law(
    problems: int, samples: int, longest: int, rollout: int
) -> None:
    whole = flat(RecordedLengths(48, 8, longest, seed=1).of(rollout))
    found = RecordedLengths(problems, samples, longest, seed=2).of(rollout)
    assert [len(one) for one in found] == [samples] * problems
    lengths = flat(found)
    assert lengths[0] == whole[0] and min(lengths) >= 1
    assert longest == 0 or lengths[0] <= longest
    assert found == RecordedLengths(problems, samples, longest, seed=2).of(rollout)
    for share in (0.25, 0.5, 0.75):
        at = int(share * len(lengths))
        assert lengths[at] == whole[at * len(whole) // len(lengths)]


def test_recorded_lengths_are_long_tailed_and_differ_by_rollout() -> None:
    lengths = RecordedLengths(48, 8, 0, seed=1)
    rollouts = [flat(lengths.of(number)) for number in range(12)]
    tails = [max(found) / statistics.median(found) for found in rollouts]
    assert statistics.median(tails) > 10 and len({tuple(found) for found in rollouts}) == 12
    assert max(map(max, rollouts)) == 320


def test_each_request_gets_the_length_that_is_its_turn() -> None:
    lengths = RecordedLengths(3, 2, 0, seed=1)
    now = lengths.begin(5)
    request = Request("2-1", (1, 2), SamplingSpec(stop_token_ids=(0,)), 7, "a problem")
    sampling = lengths(request).sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (now[2][1], now[2][1])
    lengths.begin(6)
    assert lengths(request).problem_key == "a problem" and lengths(request).sampling.max_tokens == lengths.of(6)[2][1]


def test_chains_go_on_as_often_as_they_should() -> None:
    pairs = [pair for tokens in chain_responses(20, 200, 512, 0.9, 1) for pair in pairwise(tokens)]
    assert 0.88 < sum(after == (before + 1) % 512 for before, after in pairs) / len(pairs) < 0.92


def test_a_chain_model_is_as_certain_as_asked(tmp_path: Path) -> None:
    folder = write_chain_model(tmp_path / "chain", 2, 128, certainty=0.9, hidden_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor(chain_responses(4, 50, 128, 0.9, 1))).logits.softmax(dim=-1)
    likely = (torch.tensor(chain_responses(4, 50, 128, 0.9, 1)) + 1) % 128
    assert 0.85 < float(found.gather(-1, likely[..., None]).mean()) < 0.95


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=300), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_percentile_was_measured_and_leaves_its_share_below(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < max(1, share * len(values))


def step(arm: str, number: int, seconds: float, acceptance: float, **more: float) -> dict[str, Any]:
    times = {"time/total": seconds, "time/rollout": seconds / 2, "time/update": seconds / 4}
    return {"arm": arm, "round": number, **times, "speculation/acceptance_length": acceptance, **more}


def bubble(idle: float, used: float, sessions: float = 1, preempt: float = 20.0, **more: float) -> dict[str, float]:
    values = {"idle_s": idle, "used_s": used, "sessions": sessions, "preempt_ms": preempt, "failed": 0, "cut_off": 0}
    return {**{f"spot/{name}": float(value) for name, value in values.items()}, **more}


def measured(used: float, seconds: float, with_training: float) -> dict[str, Any]:
    steps = []
    for number in range(4):
        steps.append(step("off", number, 50.0 if number == 0 else 10.0 + number, 1.0))
        spot = bubble(0.0, 0.0, 0, 0.0) if number == 0 else bubble(2.0, used, preempt=10.0 * number)
        steps.append(step("SD + spot", number, seconds, 2.0 + number, **spot, **{"drafter/steps": 7.0 * number}))
    pairs = [
        bubble(1.0, used / 2, preempt=100.0, **{"with": with_training, "without": 4.0, "alone": 4.4}) for _ in range(3)
    ]
    return {"steps": steps[::-1], "pairs": pairs, "weights": 5, "pinned": True}


def test_the_summary_leaves_out_what_settles_and_bubbles_without_a_session() -> None:
    arms = summarize(measured(used=1.8, seconds=6.0, with_training=4.0), settle=1)
    off, spot = arms["off"], arms["SD + spot"]
    assert off["seconds"] == [11.0, 12.0, 13.0] and off["step_s"] == 12.0 and off["update_s"] == 3.0
    assert off["drafter_s"] == 0.0 and "preempt_ms_p50" not in off
    assert (spot["acceptance_first"], spot["acceptance_last"], spot["drafter_steps"]) == (2.0, 5.0, 14.0)
    assert spot["idle_share_used"] == pytest.approx(0.9)
    assert (spot["bubbles"], spot["with_sessions"]) == (6, 6)
    assert (spot["preempt_ms_p50"], spot["preempt_ms_p99"]) == (30.0, 100.0)
    settling = summarize(measured(used=1.8, seconds=6.0, with_training=4.0), settle=0)["SD + spot"]
    assert (settling["bubbles"], settling["with_sessions"]) == (7, 6)


@pytest.mark.parametrize(
    ("used", "seconds", "with_training", "met"),
    [
        (1.8, 6.0, 4.0, [True, True, True]),
        (1.5, 6.0, 4.0, [False, True, True]),
        (1.8, 8.0, 4.0, [True, True, False]),
        (1.8, 6.0, 4.2, [True, False, True]),
    ],
)
def test_each_target_is_judged_for_itself(used: float, seconds: float, with_training: float, met: list[bool]) -> None:
    found = measured(used, seconds, with_training)
    result = BenchmarkResult(environment={})
    judge(result, "large", summarize(found, settle=1), found["pairs"])
    assert [entry["met"] for entry in result.targets.values()] == met
    assert slow_down(found["pairs"], "with")["ratio"] == with_training / 4.0
    assert slow_down(found["pairs"], "alone")["ratio"] == pytest.approx(1.1)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_small_target_in_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "spot.json"
    small = ["--targets", "large", "--ranks", "2", "--arms", "off", "SD + spot", "--rounds", "3", "--settle", "1"]
    small += ["--pairs", "2", "--layers", "1", "--hidden", "128", "--vocab", "128", "--longest", "400", "--drafts", "2"]
    small += ["--warm-steps", "30", "--warm-problems", "20", "--entries", "2", "--timeout", "400"]
    assert main(["bench", "spot", "--json", str(out), *small]) == 0
    found = json.loads(out.read_text())
    off, spot = found["rows"]
    assert (off["arm"], spot["arm"]) == ("off", "SD + spot") and off["weights"] == spot["weights"] > 0
    assert off["acceptance_last"] == 1.0 < spot["acceptance_last"]
    assert spot["with_sessions"] >= 2 and spot["drafter_steps"] > 0 and spot["failed"] == 0
    assert 0 < spot["idle_share_used"] < 1.2 and spot["preempt_ms_p50"] is not None
    assert spot["slow_down"]["ratio"] > 0 and spot["slow_down_beside_training_alone"]["ratio"] > 0
    phases = ("rollout_s", "log_probs_s", "update_s", "reshard_s")
    assert all(0 < row[phase] < row["step_s"] for row in (off, spot) for phase in phases)
    # without a core for each rank there is nothing to time
    assert len(found["targets"]) == (3 if off["for"] == "timing" else 0)
