"""`tlt bench rollout`: its requests, its replayed drafts, and the whole of it at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.bench.rollout import summarize
from megatron_tlt.bench.rollout_cases import Epochs, ReplayDrafter, make_cases, of_length, pareto_lengths
from megatron_tlt.bench.rollout_oracle import OracleChooser, RateTable
from megatron_tlt.cli import main
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy


def requests(count: int) -> list[Request]:
    return [Request(str(i), (1, 2), SamplingSpec(stop_token_ids=(0,)), i) for i in range(count)]


@given(st.integers(1, 200), st.integers(1, 8), st.integers(8, 64), st.integers(0, 5))
def test_lengths_stay_within_their_bounds(count: int, shortest: int, longest: int, seed: int) -> None:
    lengths = pareto_lengths(count, shortest, longest, 1.1, seed)
    assert len(lengths) == count and min(lengths) >= shortest and max(lengths) <= longest
    assert lengths == pareto_lengths(count, shortest, longest, 1.1, seed)


def test_rollouts_of_a_case_share_no_request() -> None:
    pool = [of_length(request, 1 + 3 * index) for index, request in enumerate(requests(16))]
    cases = make_cases(pool, [1, 4, 16], rollouts=3)
    assert [(case.name, [len(rollout) for rollout in case.rollouts]) for case in cases] == [
        ("whole rollout", [16]),
        ("batch 1", [1, 1, 1]),
        ("batch 4", [4, 4, 4]),
        ("batch 16", [16]),
    ]
    assert [[r.sampling.max_tokens for r in rollout] for rollout in cases[2].rollouts] == [
        [46, 34, 22, 10],
        [43, 31, 19, 7],
        [40, 28, 16, 4],
    ]
    for case in cases:
        ids = [request.request_id for rollout in case.rollouts for request in rollout]
        assert len(ids) == len(set(ids))


def test_a_length_is_all_that_changes() -> None:
    request = requests(1)[0]
    fixed = of_length(request, 9)
    assert (fixed.sampling.min_tokens, fixed.sampling.max_tokens) == (9, 9)
    assert of_length(fixed, 256) != request and fixed.prompt_token_ids == request.prompt_token_ids


def test_no_arm_is_asked_what_another_one_answered() -> None:
    pool = requests(4)
    asked = Epochs(0.25, 64).asked
    one, again, other = asked(pool, "ngram-3", 1), asked(pool, "ngram-3", 2), asked(pool, "eagle-3", 1)
    assert [r.seed for r in one] == [r.seed for r in other] != [r.seed for r in again]
    assert [r.problem_key for r in one] == [r.problem_key for r in again]
    assert not {r.problem_key for r in one} & {r.problem_key for r in other}
    assert all(0 <= r.seed < 1 << 63 for r in one)


def test_replayed_drafts_are_right_as_often_as_asked() -> None:
    response = [i % 50 for i in range(4000)]
    drafter = ReplayDrafter({"a": response}, acceptance=0.8, vocab_size=50)
    drafter.start("a", "", [1])
    right = 0
    for position in range(0, 4000, 4):
        proposal = drafter.propose("a", 4).tokens
        right += sum(a == b for a, b in zip(proposal, response[position : position + 4], strict=True))
        drafter.extend("a", response[position : position + 4])
    assert 0.77 < right / 4000 < 0.83
    assert drafter.propose("a", 4).tokens == []


def test_the_first_round_is_kept_apart() -> None:
    row = {"case": "batch 1", "arm": "off", "acceptance_length": 1.0, "tokens": 3}
    rows = [{**row, "repeat": repeat, "seconds": 5.0 - repeat} for repeat in range(3)]
    assert summarize(rows)["batch 1"]["off"]["seconds"] == [4.0, 3.0]
    assert summarize(rows)["batch 1"]["off"]["cold"] == 5.0


@given(st.integers(1, 64), st.floats(0.0, 1.0), st.integers(0, 9))
def test_lengths_scatter_alike_for_every_arm(length: int, spread: float, repeat: int) -> None:
    pool = [of_length(request, length) for request in requests(20)]
    epochs = Epochs(spread, 64)
    one, other = ([r.sampling.max_tokens for r in epochs.asked(pool, arm, repeat)] for arm in ("off", "eagle-3"))
    assert one == other == [epochs.length(request, repeat) for request in pool]
    assert all(1 <= n <= 64 for n in one)
    assert spread or one == [length] * 20
    if 8 < length < 32 and spread > 0.2:
        assert len(set(one)) > 1


def test_the_oracle_takes_what_was_the_fastest_at_the_nearest_batch_as_it_is_known_now() -> None:
    table, drafts = RateTable(), Strategy("ngram", 3)

    def add(strategy: Strategy, batch: int, tokens: int, seconds: float) -> None:
        table.add(StepRecord(strategy, batch, seconds, tokens))

    assert table.rate(drafts, 4) == 0.0
    for batch, tokens in ((1, 3), (64, 70)):
        add(OFF, batch, batch, 0.01)
        add(drafts, batch, tokens, 0.02)
    assert (table.rate(OFF, 10), table.rate(drafts, 10)) == pytest.approx((100.0, 150.0))
    chooser = OracleChooser([OFF, drafts], table)
    assert chooser.next(1, ())[0] == drafts
    assert [chooser.next(64, ())[0] for _ in range(4)][-1] == OFF
    # what was asked before is computed anew once there is more to know
    for _ in range(4):
        add(OFF, 1, 1, 0.001)
    assert table.rate(OFF, 1) == pytest.approx(1000.0)
    table.add(StepRecord(OFF, 1, 9.0, 1, next_strategy=drafts))  # shared by two strategies: not counted
    assert table.rate(OFF, 1) == pytest.approx(1000.0)
    assert [chooser.next(1, ())[0] for _ in range(4)][-1] == OFF


@pytest.mark.slow
@pytest.mark.distributed
def test_a_small_target_under_every_arm(tmp_path: Path) -> None:
    out = tmp_path / "rollout.json"
    small = ["--targets", "large", "--batches", "1", "4", "--rollouts", "1", "--repeats", "1", "--drafts", "3"]
    small += ["--large-requests", "6", "--large-longest", "12", "--large-layers", "1", "--timeout", "400"]
    assert main(["bench", "rollout", "--json", str(out), *small]) == 0
    found = json.loads(out.read_text())
    cases = {(row["case"], row["arm"]) for row in found["rows"]}
    arms = {"off", "off, able to draft", "suffix-1", "suffix-3", "beg_mab", "solver", "oracle", "vLLM's ngram-3"}
    assert {(case, arm) for case in ("whole rollout", "batch 1", "batch 4") for arm in arms} <= cases
    # the same lengths whatever drafts: that is what makes times comparable
    for case in ("whole rollout", "batch 1", "batch 4"):
        assert len({row["tokens"] for row in found["rows"] if row["case"] == case}) == 1
    replayed = next(row for row in found["rows"] if (row["case"], row["arm"]) == ("whole rollout", "suffix-3"))
    assert replayed["drafts"] == "replayed" and replayed["acceptance_length"] > 1.5
    assert len(found["targets"]) == 9
