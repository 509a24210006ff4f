"""What an algorithm's config changes in a run on the real libraries."""

from __future__ import annotations

import json

import pytest

from tests.trainer.conftest import Runs, rows_of
from tests.trainer.test_run import weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_a_penalty_on_the_reward_is_the_drift_from_the_initial_policy(runs: Runs) -> None:
    log = runs.train(
        "kl-in-reward",
        "algorithm={name: reinforce++_baseline, group_size: 4, entropy_coefficient: 0.1, "
        "kl: {coefficient: 0.5, placement: reward}, correction: {weights: sequence, max_k1: 5.0e-8, opsm_delta: 1}}",
        "trainer.steps=3",
        "actor.megatron.hidden_dropout=0",
    )
    assert "note: algorithm.name: reinforce++_baseline sets normalize_by_std: False" in log
    found = rows_of(runs.folder / "kl-in-reward")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert found[0]["reward/kl"] == pytest.approx(0.0, abs=1e-4), "the first step samples from the reference itself"
    assert found[1]["reward/kl"] > 1e-3 and found[2]["reward/kl"] > 1e-3
    assert found[2]["actor/kl"] > 0, "logged, and not in the loss"
    assert all(row["correction/weight_mean"] == pytest.approx(1.0, abs=1e-4) for row in found)
    assert all(0 < row["correction/rejected_share"] < 1 for row in found), [
        row["correction/rejected_share"] for row in found
    ]
    assert all(row["actor/opsm_fraction"] == 0 for row in found)


def test_without_a_pass_for_old_log_probs_those_of_the_rollout_take_their_place(runs: Runs) -> None:
    few = ("trainer.steps=2", "actor.megatron.hidden_dropout=0", "run.deterministic=false")
    runs.train("scored", "algorithm={group_size: 4, loss: gspo, entropy_coefficient: 0.1}", *few)
    runs.train(
        "bypass", "algorithm={group_size: 4, loss: gspo, entropy_coefficient: 0.1, correction: {bypass: true}}", *few
    )
    scored, bypassed = rows_of(runs.folder / "scored"), rows_of(runs.folder / "bypass")
    assert not any(name.startswith("mismatch/") for name in bypassed[0]) and "mismatch/k3_kl" in scored[0]
    for one, other in zip(scored, bypassed, strict=True):
        assert other["actor/loss"] == pytest.approx(one["actor/loss"], rel=1e-3)
        assert other["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
    summary = json.loads((runs.folder / "bypass" / "summary.json").read_text())
    assert summary["rollout"]["logprob_mismatch"] == {"mean_abs": None, "max_abs": None, "k3_kl": None}
    assert (runs.folder / "bypass" / "report.html").is_file()


def test_dynamic_sampling_goes_on_from_the_problem_that_it_had_reached(runs: Runs) -> None:
    dapo = "algorithm={name: dapo, group_size: 4, entropy_coefficient: 0.1, overlong: {filter: true}}"
    few = (dapo, "algorithm.dynamic_sampling.max_generations=2", "trainer.save_every=1")
    runs.train("dapo", "trainer.steps=3", *few)
    runs.train("dapo-again", "trainer.steps=2", *few)
    runs.train("dapo-again", "trainer.steps=3", *few)
    whole, resumed = rows_of(runs.folder / "dapo"), rows_of(runs.folder / "dapo-again")
    assert [row["sampling/problems_drawn"] for row in whole] == [row["sampling/problems_drawn"] for row in resumed]
    assert max(row["sampling/generations"] for row in whole) == 2.0
    state = json.loads((runs.folder / "dapo" / "checkpoints" / "step_000003" / "state.json").read_text())
    assert state["problems_drawn"] == sum(row["sampling/problems_drawn"] for row in whole) > 3 * 4
    weights = [(runs.folder / name / "hf" / "model.safetensors").read_bytes() for name in ("dapo", "dapo-again")]
    assert weights[0] == weights[1]


def test_a_curriculum_goes_on_where_it_was(runs: Runs) -> None:
    settings = ("trainer.curriculum={decay: 0.5}", "trainer.save_every=1")
    runs.train("curriculum", "trainer.steps=4", *settings)
    for steps in (2, 4):
        runs.train("curriculum-again", f"trainer.steps={steps}", *settings)
    whole, resumed = rows_of(runs.folder / "curriculum"), rows_of(runs.folder / "curriculum-again")
    names = [name for name in whole[-1] if name.startswith("curriculum/")]
    assert {"curriculum/gcd_weight", "curriculum/chain_sum_weight"} <= {*names}
    assert [[row.get(name) for name in names] for row in whole] == [
        [row.get(name) for name in names] for row in resumed
    ]
    assert weights(runs.folder / "curriculum") == weights(runs.folder / "curriculum-again")
