"""Runs whose optimizer steps whole tensors: killed and resumed, and with the reward as its loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.conftest import Runs
from tests.trainer.test_run import rows, wait_for_rows, weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

MUON = (
    "actor.optimizer={optimizer: torch.optim.Muon, lr: 5.0e-3, weight_decay: 0.01}",
    "actor.optimizer_split={lr: 1.0e-3}",
    "actor.lr_schedule={kind: cosine, min_lr_fraction: 0.1}",
    "trainer.steps=3",
)
COUPLED = (
    "actor.optimizer={optimizer: tests.helpers.coupled_optimizer.CoupledRnn, lr: 1.0e-3}",
    "actor.optimizer_loss=one_minus_reward",
    "model.recipe.supervised.optimizer={optimizer: adam, lr: 5.0e-3}",
    "trainer.steps=2",
)


def rates(run: Path) -> list[float]:
    return [row["actor/lr"] for row in rows(run)[1:]]


def test_killed_and_resumed_it_ends_with_the_same_bits(runs: Runs) -> None:
    runs.train("muon", *MUON)
    process = runs.start("killed-muon", *MUON, fresh=False)
    wait_for_rows(runs, "killed-muon", 1, process, checkpoints=1)
    runs.kill("killed-muon")
    process.wait()
    runs.train("killed-muon", *MUON)
    whole, killed = runs.folder / "muon", runs.folder / "killed-muon"
    assert weights(whole) == weights(killed)
    assert rates(whole) == rates(killed) and rates(whole)[0] > rates(whole)[1] > rates(whole)[2]
    assert all(row["actor/grad_norm"] > 1e-3 for row in rows(whole)[1:]), "equal bits would show nothing"


def test_a_class_that_takes_the_loss_gets_one_minus_the_reward(runs: Runs) -> None:
    runs.train("coupled", *COUPLED)
    summary = json.loads((runs.folder / "coupled" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["reshard"]["verified_tensors"] > 0
    # another loss is another step
    runs.train("coupled-by-loss", *COUPLED, "actor.optimizer_loss=policy")
    assert weights(runs.folder / "coupled") != weights(runs.folder / "coupled-by-loss")
