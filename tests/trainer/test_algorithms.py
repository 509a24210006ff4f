"""What an algorithm's config changes in a run on the real libraries."""

from __future__ import annotations

import pytest

from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_a_penalty_on_the_reward_is_the_drift_from_the_initial_policy(runs: Runs) -> None:
    log = runs.train(
        "kl-in-reward",
        "algorithm={name: reinforce++_baseline, group_size: 4, entropy_coefficient: 0.1, "
        "kl: {coefficient: 0.5, placement: reward}}",
        "trainer.steps=3",
        "actor.megatron.hidden_dropout=0",
    )
    assert "note: algorithm.name: reinforce++_baseline sets normalize_by_std: False" in log
    found = rows_of(runs.folder / "kl-in-reward")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert found[0]["reward/kl"] == pytest.approx(0.0, abs=1e-4), "the first step samples from the reference itself"
    assert found[1]["reward/kl"] > 1e-3 and found[2]["reward/kl"] > 1e-3
    assert found[2]["actor/kl"] > 0, "logged, and not in the loss"
