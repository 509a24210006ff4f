"""A reference policy that moves, and one that is a teacher."""

from __future__ import annotations

import shutil

import pytest

from tests.trainer.conftest import Runs, rows_of
from tests.trainer.test_run import weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MOVED = (
    "algorithm={group_size: 4, entropy_coefficient: 0.1, kl: {coefficient: 0.1, update_every: 2}}",
    "actor.megatron.hidden_dropout=0",
)


def test_a_reference_moves_and_a_resumed_run_goes_on_with_the_same_bits(runs: Runs) -> None:
    runs.train("moved", *MOVED, "trainer.steps=5")
    drift = [row["actor/kl"] for row in rows_of(runs.folder / "moved")]
    # the update's first pass has the weights that the reference took at the end of the step before
    assert drift[0] == drift[2] == drift[4] == pytest.approx(0.0, abs=1e-9)
    assert drift[1] > 1e-7 and drift[3] > 1e-7
    kept = sorted(path.name for path in (runs.folder / "moved" / "reference").iterdir())
    assert kept == ["step_000002", "step_000004"], "step 3, the oldest checkpoint at the last move, needs step 2"
    for steps in (3, 5):
        runs.train("moved-again", *MOVED, f"trainer.steps={steps}")
    assert weights(runs.folder / "moved-again") == weights(runs.folder / "moved")


def test_a_lost_reference_is_named(runs: Runs) -> None:
    runs.train("moved-lost", *MOVED, "trainer.steps=3")
    shutil.rmtree(runs.folder / "moved-lost" / "reference")
    log = runs.train("moved-lost", *MOVED, "trainer.steps=4", expect_status=1)
    assert "reference/step_000002: not a readable checkpoint" in log


def test_distillation_brings_the_policy_near_its_teacher(runs: Runs) -> None:
    runs.train("teacher", "trainer.steps=4", "actor.optimizer.lr=5.0e-3")
    kl = f"kl: {{reference: {runs.folder / 'teacher' / 'hf'}}}"
    distillation = f"algorithm={{name: distillation, group_size: 4, {kl}}}"
    log = runs.train("student", distillation, "trainer.steps=8", "actor.megatron.hidden_dropout=0")
    assert "note: algorithm.name: distillation sets kl.coefficient: 1.0, kl.estimator: k2" in log
    drift = [row["actor/kl"] for row in rows_of(runs.folder / "student")]
    assert sum(drift[-2:]) < 0.5 * sum(drift[:2]), drift
    assert all("reward/mean" in row for row in rows_of(runs.folder / "student"))
