"""What an engine's chooser tells its tuner: the largest batch, and the budgets that drafts were made under."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.adaptive import build_controller, default_strategies
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.strategy import OFF, BudgetMix, StepRecord, Strategy
from megatron_tlt.speculation.tuner_beg_mab import BegMabTuner

REQUESTS = [Request(str(i), (1, 2), SamplingSpec(), i, f"problem {i}") for i in range(4)]


def chooser(max_num_seqs: int | None = None, **adaptive: Any) -> SpeculationController:
    section = {"drafter": "suffix", "num_speculative_tokens": 3, "adaptive": {"threshold": 100, **adaptive}}
    return build_controller(SpeculationConfig.model_validate(section), 64, seed=1, max_num_seqs=max_num_seqs)


@pytest.mark.parametrize(("max_num_seqs", "largest"), [(None, 104), (256, 104), (64, 64)])
def test_the_largest_batch_is_that_of_the_gate_or_of_the_engine(max_num_seqs: int | None, largest: int) -> None:
    tuner = chooser(max_num_seqs).tuner
    assert isinstance(tuner, BegMabTuner)
    assert tuner.max_batch == largest == tuner.buckets[-1].upper
    assert tuner.choose(largest + 1) == OFF


def test_buckets_that_end_below_the_gate_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculation.adaptive: bounds .*\[4, 32\]; the last must be 104 or more"):
        chooser(options={"bounds": [4, 32]})
    assert chooser(32, options={"bounds": [4, 32]})


def test_a_step_is_judged_by_the_budgets_of_the_requests_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chooser(patience=1, lengths="classes", tuner="static", strategies=["suffix-3"])
    seen: list[StepRecord] = []
    monkeypatch.setattr(made.tuner, "observe", seen.append)
    made.begin_rollout({request.request_id: (request.problem_key, 0) for request in REQUESTS})
    arm, before = Strategy("suffix", 3, by_length=True), OFF
    for running in (4, 4, 3, 1):
        names = [request.request_id for request in REQUESTS[:running]]
        strategy, budgets = made.next(running, dict.fromkeys(names, 1))
        # without a history all responses are of medium length, which have half of the drafts
        assert strategy == arm and budgets == dict.fromkeys(names, 2)
        accepted = (1, 0, 0) if before == arm else ()
        made.observe(
            StepRecord(
                before, running, 0.01, running + sum(accepted), 2, accepted, next_strategy=arm,
            )
        )  # fmt: skip
        before = arm
    assert [step.budgets for step in seen] == [BudgetMix.of([2] * running) for running in (4, 3, 1)]
    assert {step.accepted_per_position for step in seen} == {(1, 0, 0)}
    assert [step.mean_budget for step in seen] == [2.0] * 3


def test_lengths_are_kept_where_the_tuner_is_another_one() -> None:
    made, other = chooser(lengths="classes"), chooser(lengths="classes", tuner="solver")
    assert made.lengths is not None and other.lengths is not None
    made.lengths.record("problem 0", 50)
    with pytest.raises(ValueError, match="tuner solver: the state is of tuner 'beg_mab'"):
        other.load_state(made.state())
    assert other.lengths.history.state() == made.lengths.history.state()


def test_a_head_comes_with_suffix_trees_the_pair_of_both_and_bounds() -> None:
    names = [strategy.name for strategy in default_strategies("eagle3", 5)]
    heads = ["eagle3-1", "eagle3-3", "eagle3-5"]
    sure = ["eagle3-5-p50", "suffix+eagle3-5-p50"]
    assert names == ["off", "suffix-3", "suffix-5", *heads, "suffix+eagle3-5", *sure]
    assert [strategy.name for strategy in default_strategies("suffix", 4)] == [
        "off",
        "suffix-1",
        "suffix-3",
        "suffix-4",
    ]
    short = [strategy.name for strategy in default_strategies("eagle", 2, budgets=True)]
    assert short == ["off", "suffix-2", "eagle-2", "suffix+eagle-2"]
