"""The judge of updates, on histories of plain numbers."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.guard import GuardConfig
from megatron_tlt.trainer.update_guard import UpdateGuard

SPIKES = GuardConfig(spike_factor=3.0, spike_window=4, on_spike="skip", most_in_a_row=1000)
NORMS = st.one_of(st.floats(0.0, 1e30), st.sampled_from([math.nan, math.inf, 0.0, 1.0, 1.5, 100.0]))


def test_without_a_factor_all_that_is_finite_is_accepted() -> None:
    guard = UpdateGuard(GuardConfig())
    assert [guard.judge(norm, 0.0).decision for norm in (1.0, 1e9, 0.0)] == ["accept"] * 3
    assert guard.judge(math.nan, 0.0).decision == "stop"


@pytest.mark.parametrize(("norm", "loss"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan), (1.0, -math.inf)])
@pytest.mark.parametrize("decision", ["stop", "skip", "go_back"])
def test_what_is_not_finite_is_never_applied(norm: float, loss: float, decision: str) -> None:
    verdict = UpdateGuard(GuardConfig(on_nonfinite=decision)).judge(norm, loss)  # type: ignore[arg-type]
    assert verdict.decision == decision and not verdict.is_applied and "not finite" in verdict.why


@pytest.mark.parametrize("decision", ["warn", "skip", "go_back"])
def test_a_spike_exceeds_the_median_of_the_last_applied_updates(decision: str) -> None:
    settings = GuardConfig(spike_factor=3.0, spike_window=4, on_spike=decision)  # type: ignore[arg-type]
    guard = UpdateGuard(settings)
    assert guard.judge(1.0, 0.0).decision == "accept"
    assert guard.judge(100.0, 0.0).decision == "accept", "half of the window is not known"
    for norm in (1.0, 1.0, 2.0):
        guard.judge(norm, 0.0)
    assert guard.median == 1.5
    assert guard.judge(4.5, 0.0).decision == "accept"
    verdict = guard.judge(5.0, 0.0)
    assert (verdict.decision, verdict.median) == (decision, 1.5) and verdict.is_applied == (decision == "warn")


def test_steps_without_a_gradient_do_not_count_as_usual_norms() -> None:
    guard = UpdateGuard(SPIKES)
    for norm in (1.0, 1.2, 0.0, 0.0, 0.0, 0.0):
        assert guard.judge(norm, 0.0).decision == "accept"
    assert guard.median == pytest.approx(1.1)


def test_without_a_checkpoint_an_update_is_skipped() -> None:
    verdict = UpdateGuard(GuardConfig(on_nonfinite="go_back")).judge(math.nan, 0.0, may_go_back=False)
    assert verdict.decision == "skip" and "no checkpoint" in verdict.why


def test_so_many_skipped_updates_in_a_row_stop_the_run() -> None:
    guard = UpdateGuard(GuardConfig(on_nonfinite="skip", most_in_a_row=3))
    norms = [math.nan, math.nan, 1.0, math.nan, math.nan, math.nan]
    decisions = [guard.judge(norm, 0.0).decision for norm in norms]
    assert decisions == ["skip", "skip", "accept", "skip", "skip", "stop"]


def test_a_run_that_returns_again_and_again_to_the_same_place_stops() -> None:
    guard = UpdateGuard(GuardConfig(on_nonfinite="go_back", most_in_a_row=3))
    decisions = []
    saved = None
    for norm in (1.0, 1.0):
        guard.judge(norm, 0.0)
    saved = guard.state
    for _ in range(3):
        assert guard.judge(1.0, 0.0).is_applied, "good updates before the bad one are no progress"
        decisions.append(guard.judge(math.nan, 0.0).decision)
        guard.go_back(saved, 2)
    assert decisions == ["go_back", "go_back", "stop"] and guard.returns == 3
    guard.go_back(saved, 2)
    guard.judge(1.0, 0.0)
    guard.judge(1.0, 0.0)
    assert guard.state["in_a_row"] == 3
    guard.judge(1.0, 0.0)
    assert guard.state["in_a_row"] == 0, "the run has come further"
    guard.go_back(None, 2)
    assert guard.state["updates"] == 2 and guard.median is None


@given(st.lists(NORMS, max_size=60), st.integers(0, 60))
def test_decisions_follow_from_the_history_and_survive_a_resume(norms: list[float], cut: int) -> None:
    settings = SPIKES.model_copy(update={"on_nonfinite": "skip"})
    guard = resumed = UpdateGuard(settings)
    applied: list[float] = []
    for at, norm in enumerate(norms):
        if at == cut:
            resumed = UpdateGuard(settings)
            resumed.restore(json.loads(json.dumps(guard.state)), at)
        verdict = guard.judge(norm, 0.0)
        if resumed is not guard:
            again = resumed.judge(norm, 0.0)
            assert (again.decision, again.median) == (verdict.decision, verdict.median)
        known = sorted(applied[-4:])
        if not math.isfinite(norm):
            assert verdict.decision == "skip"
        elif len(known) < 2:
            assert verdict.decision == "accept"
        else:
            median = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
            assert verdict.decision == ("skip" if norm > 3.0 * median else "accept")
        if verdict.is_applied and norm > 0:
            applied.append(norm)
    assert guard.state["norms"] == applied[-4:]
