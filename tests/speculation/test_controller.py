"""Gate, hold and attribution of steps around a tuner."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.strategy import OFF, BudgetMix, BudgetsOf, StepRecord, Strategy
from megatron_tlt.speculation.tuners import build_tuner

ARMS = [Strategy("ngram", 1), Strategy("ngram", 3)]
STRATEGIES = [OFF, *ARMS, Strategy("eagle", 3)]


class Alternating:
    """A tuner that chooses another strategy each time and records its observations."""

    strategies = ARMS

    def __init__(self) -> None:
        self.seen: list[StepRecord] = []
        self.batches: list[int] = []

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        self.batches.append(batch)
        return ARMS[len(self.batches) % 2]

    def observe(self, step: StepRecord) -> None:
        self.seen.append(step)

    def drafter_changed(self, drafter: str) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


def play(controller: SpeculationController, batches: list[int], seed: int = 0) -> list[Strategy]:
    """The chosen strategies, with each step observed as in an engine."""
    rng, verified, given = random.Random(seed), OFF, []
    for batch in batches:
        drafted = controller.choose(batch)
        accepted = sorted((rng.randint(0, batch) for _ in range(verified.num_tokens)), reverse=True)
        seconds = 0.01 * rng.lognormvariate(0, 0.2) * (1 + 0.1 * verified.num_tokens)
        drafts = batch * verified.num_tokens
        controller.observe(
            StepRecord(verified, batch, seconds, batch + sum(accepted), drafts, tuple(accepted), next_strategy=drafted)
        )
        given.append(drafted)
        verified = drafted
    return given


def test_a_choice_is_held_and_only_its_steady_steps_are_observed() -> None:
    tuner = Alternating()
    controller = SpeculationController(tuner, ElasticGate(8, patience=1), hold_steps=4)
    given = play(controller, [4] * 12)
    assert given == [ARMS[1]] * 4 + [ARMS[0]] * 4 + [ARMS[1]] * 4
    assert [step.strategy for step in tuner.seen] == [ARMS[1]] * 3 + [ARMS[0]] * 3 + [ARMS[1]] * 3
    assert controller.steps == {ARMS[1].name: 8, ARMS[0].name: 4}


def test_above_the_gate_nothing_is_drafted_and_plain_steps_are_observed() -> None:
    tuner = Alternating()
    controller = SpeculationController(tuner, ElasticGate(8, patience=2, hysteresis=1), hold_steps=3)
    assert play(controller, [20, 8, 9, 8, 8, 8, 10, 8]) == [OFF] * 4 + [ARMS[1]] * 2 + [OFF] * 2
    assert [step.strategy for step in tuner.seen] == [OFF] * 4 + [ARMS[1], OFF]


def test_a_batch_that_grows_or_halves_ends_the_hold() -> None:
    tuner = Alternating()
    controller = SpeculationController(tuner, ElasticGate(16, patience=1), hold_steps=10)
    play(controller, [8, 7, 5, 4, 4, 6, 6])
    assert tuner.batches == [8, 4, 6]


def test_steps_with_prompts_belong_to_no_strategy() -> None:
    controller = SpeculationController(Alternating())
    assert controller.observe(StepRecord(OFF, 4, 0.1, 4))
    assert not controller.observe(StepRecord(OFF, 4, 0.1, 4, had_prefill=True))
    assert not controller.observe(StepRecord(OFF, 4, 0.1, 4, next_strategy=ARMS[0]))
    assert not controller.observe(StepRecord(OFF, 4, 0.0, 4))


def test_a_new_rollout_closes_the_gate_and_keeps_the_tuner() -> None:
    controller = SpeculationController(build_tuner("beg_mab", STRATEGIES, max_batch=12), ElasticGate(8, patience=2))
    play(controller, [4] * 40)
    learnt = controller.tuner.state()
    controller.begin_rollout()
    assert controller.choose(4) == OFF and controller.tuner.state() == learnt


@settings(max_examples=25)
@given(st.sampled_from(["beg_mab", "solver"]), st.integers(0, 99), st.lists(st.integers(1, 20), max_size=60), st.data())
def test_ranks_with_equal_inputs_decide_alike_also_after_a_resume(
    name: str, seed: int, batches: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(batches)))
    ranks = [
        SpeculationController(build_tuner(name, STRATEGIES, {}, seed, max_batch=14), ElasticGate(12, 2, 2))
        for _ in range(3)
    ]
    first = [play(rank, batches[:cut], seed) for rank in ranks[:2]]
    assert first[0] == first[1]
    ranks[2].load_state(json.loads(json.dumps(ranks[0].state())))
    assert (
        play(ranks[0], batches[cut:], seed)
        == play(ranks[1], batches[cut:], seed)
        == play(ranks[2], batches[cut:], seed)
    )
    assert ranks[0].state() == ranks[1].state() == ranks[2].state()


def test_a_hold_without_a_steady_step_is_refused() -> None:
    with pytest.raises(ValueError, match="hold_steps is 1; allowed: 2 and more"):
        SpeculationController(Alternating(), hold_steps=1)


def test_budgets_are_computed_only_with_each_choice() -> None:
    class Asking(Alternating):
        def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
            assert budgets is not None
            mixes.append(budgets(ARMS[0]))
            return ARMS[0]

    mixes: list[BudgetMix | None] = []
    controller = SpeculationController(Asking(), ElasticGate(8, patience=1), hold_steps=4)
    for step in range(9):
        controller.choose(3, lambda strategy: BudgetMix.of([0, step, strategy.num_tokens]))  # noqa: B023
    assert mixes == [BudgetMix.of([0, step, 1]) for step in (0, 4, 8)]
