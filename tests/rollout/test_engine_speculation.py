"""What drafts in an engine's steps: never a drafter that is a guess, and the counts of what did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.rollout.adaptive import build_controller
from megatron_tlt.rollout.engine_speculation import EngineSpeculation, RolloutAccount, account_metrics
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.gain import LEAST_COVERAGE
from megatron_tlt.speculation.plain_times import PlainStepProbe
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy

from .conftest import SPECULATION
from .test_lossless import greedy_requests

if TYPE_CHECKING:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

REQUESTS = [Request(str(i), (1, 2), SamplingSpec(), i, f"problem {i}") for i in range(4)]


def made(needs_training: bool = True, **adaptive: Any) -> EngineSpeculation:
    section: dict[str, Any] = {"drafter": "eagle", "num_speculative_tokens": 3}
    if not adaptive:
        return EngineSpeculation(SpeculationConfig.model_validate(section), None, needs_training=needs_training)
    config = SpeculationConfig.model_validate(section | {"adaptive": {"patience": 1, **adaptive}})
    return EngineSpeculation(config, build_controller(config, 64, seed=1), needs_training=needs_training)


def chosen(speculation: EngineSpeculation, version: int, steps: int = 120) -> set[str]:
    """The drafters of a rollout's strategies; a step takes as long whatever drafts, so drafts always pay."""
    speculation.begin_rollout(REQUESTS, version)
    found, before = set(), OFF
    for at in range(steps):
        strategy, _ = speculation.next(4, {request.request_id: at for request in REQUESTS})
        found.add(strategy.drafter)
        accepted = (3,) * before.num_tokens
        tokens = 4 + sum(accepted)
        drafts = 4 if before.num_tokens else 0
        drafted = 4 * before.num_tokens
        speculation.observe(
            StepRecord(before, 4, 0.01, tokens, drafted, accepted, next_strategy=strategy, num_drafts=drafts)
        )
        before = strategy
    speculation.end_rollout(REQUESTS)
    return found


def test_an_untrained_drafter_made_from_the_target_does_not_draft_and_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    static = made()
    assert [chosen(static, version) for version in (0, 0, 20, 40)] == [{"off"}, {"off"}, {"eagle"}, {"eagle"}]
    assert capsys.readouterr().err.count("note: the eagle drafter starts from the target") == 1
    assert chosen(made(needs_training=False), 0) == {"eagle"}, "one with a folder of its own has been trained"


@pytest.fixture
def head_engine(drafting: VllmEngine) -> Iterator[VllmEngine]:
    """The shared engine; a chooser's last strategy stays in force, which other tests do not expect."""
    before = drafting.strategy
    yield drafting
    drafting.set_strategy(before)


@pytest.mark.parametrize("tuner", ["beg_mab", "solver"])
def test_the_tuner_chooses_among_the_others_until_the_drafter_is_trained(tuner: str) -> None:
    speculation = made(tuner=tuner)
    assert {"suffix"} <= chosen(speculation, 0) <= {"off", "suffix"}
    assert speculation.account.withheld == ["eagle"]
    speculation.adaptive.tuner.drafter_changed("eagle")  # type: ignore[union-attr]
    assert "eagle" in chosen(speculation, 20)
    assert speculation.account.withheld == []


def test_a_tuner_with_one_strategy_is_off_until_then() -> None:
    speculation = made(tuner="static", strategies=["eagle-3"])
    assert chosen(speculation, 0) == {"off"}
    assert chosen(speculation, 1) == {"eagle"}


def test_counts_are_of_one_rollout_and_metrics_of_all_engines() -> None:
    speculation = made()
    chosen(speculation, 5, steps=11)
    first = speculation.account
    expected = RolloutAccount({"off": 1, "eagle-3": 10}, None, {"eagle": 40}, {"eagle": 90}, [])
    assert replace(first, gain=expected.gain, switches=0, choosing_s=0.0) == expected
    assert (first.switches, first.catch_up_s) == (0, 0.0)
    chosen(speculation, 5, steps=6)
    assert speculation.account.steps == {"off": 1, "eagle-3": 5} and first.steps["eagle-3"] == 10
    other = RolloutAccount({"off": 9}, 3, {"suffix": 4}, {"suffix": 2}, ["eagle"], first.gain, 4, 0.010, 0.002)
    metrics = account_metrics([first, other])
    assert metrics.pop("speculation/switches") == 2.0
    assert metrics.pop("speculation/switch_ms") == pytest.approx(2.5)
    assert metrics.pop("speculation/catch_up_ms") == pytest.approx(1.0)
    gain = {name for name in metrics if "gain" in name or name.endswith("_s")}
    assert {name: value for name, value in metrics.items() if name not in gain} == {
        "speculation/share_off": 10 / 20,
        "speculation/share_eagle-3": 10 / 20,
        "speculation/gate_open": 3 / 20,
        "speculation/acceptance_length_eagle": 1 + 90 / 40,
        "speculation/acceptance_length_suffix": 1.5,
        "speculation/drafter_withheld": 1.0,
    }
    assert gain == {"speculation/gain_coverage", "speculation/rollout_s"}, "no step without drafts was measured"
    assert account_metrics([]) == account_metrics([RolloutAccount()]) == {}


def test_in_an_engine_nothing_is_drafted_with_it_until_it_is_trained(head_engine: VllmEngine) -> None:
    head = head_engine.drafters[-1]
    config = SPECULATION.model_copy(update={"drafter": head})
    speculation = EngineSpeculation(config, None, needs_training=True)
    requests = greedy_requests(count=6, max_tokens=16)
    responses = {}
    for version in (0, 1):
        speculation.begin_rollout(requests, version)
        responses[version] = [r.token_ids for r in head_engine.generate(requests, chooser=speculation)]
        speculation.end_rollout(requests)
        account = speculation.account
        assert account.drafts.keys() == ({head} if version else set())
        # the prompts' step has no drafts to verify
        assert account.steps.keys() == ({"off", Strategy(head, 3).name} if version else {"off"})
    assert responses[0] == responses[1]


def test_a_few_steps_of_training_rollouts_are_made_without_drafts_and_give_the_gain(head_engine: VllmEngine) -> None:
    """Fixed drafting, so that there is no other step without; responses are those of the same engine without probes."""
    head = head_engine.drafters[-1]
    speculation = EngineSpeculation(SPECULATION.model_copy(update={"drafter": head}), None, probe_share=0.2)
    requests = greedy_requests(count=6, max_tokens=48)
    responses, plain = [[r.token_ids for r in head_engine.generate(requests)]], []
    for _ in range(3):
        speculation.begin_step()
        speculation.begin_rollout(requests, 0)
        found = head_engine.generate(requests, on_finished=speculation.finished, chooser=speculation)
        speculation.end_rollout(requests)
        responses.append([r.token_ids for r in found])
        plain.append(speculation.account.steps["off"])
    assert plain[0] > 1, "the prompts' step verifies nothing either"  # later ones may have been measured enough
    assert all(found == responses[0] for found in responses)
    metrics = account_metrics([speculation.account])
    assert metrics["speculation/gain_coverage"] > 0.5 and metrics["speculation/rollout_s"] > 0
    if metrics["speculation/gain_coverage"] >= LEAST_COVERAGE:
        assert 0.02 < metrics["speculation/gain"] < 50, "a ratio of times, and the machine may be busy"


def test_a_rollout_that_was_cut_short_is_probed_alike_when_it_is_repeated() -> None:
    """As a checkpoint holds what was before it, and an evaluation, which a resumed run may repeat, changes nothing."""
    speculation = made(needs_training=False)

    def rollout(training: bool = True) -> None:
        if training:
            speculation.begin_step()
        chosen(speculation, 1, steps=700)

    rollout()
    speculation.keep_rollout()
    kept = json.dumps(speculation.state()["probe"])
    assert json.loads(kept)["measured"], "steps were probed"
    rollout(training=False)
    speculation.keep_rollout()
    assert json.dumps(speculation.state()["probe"]) == kept
    rollout()
    assert json.dumps(speculation.state()["probe"]) == kept
    again = made(needs_training=False)
    again.load_state(json.loads(json.dumps(speculation.state())))
    again.begin_step()
    chosen(again, 1, steps=700)
    assert again.account.steps == speculation.account.steps
    speculation.keep_rollout()
    assert json.dumps(speculation.state()["probe"]) != kept


def test_a_step_that_is_made_plain_is_no_observation_of_the_strategys_budgets() -> None:
    speculation = made(needs_training=False, tuner="static", strategies=["eagle-3"], lengths="classes")
    speculation._probe = PlainStepProbe(share=1.0)
    speculation.begin_step()
    speculation.begin_rollout(REQUESTS)
    budgets = [speculation.next(4, dict.fromkeys("0123", at)) for at in range(12)]
    plain = [strategy == OFF for strategy, _ in budgets]
    assert any(plain) and not all(plain)
    assert all((given is None) == off for off, (_, given) in zip(plain, budgets, strict=True))
    assert speculation.adaptive is not None
    speculation.adaptive.next(4, dict.fromkeys("0123", 12))
    assert (speculation.adaptive._verified is None) == plain[-1]
