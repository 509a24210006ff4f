"""Runs whose idle replica trains on its responses while the other engine decodes."""

from __future__ import annotations

import pytest

from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

UNEQUAL = (
    "rollout.engine=tests.trainer.unequal_engine.UnequalEngine",
    "rollout.engine_arguments={seconds: 0.15}",
    "run.deterministic=false",
    "actor.megatron.hidden_dropout=0",
    "evaluation.every=0",
    "trainer.steps=3",
)
SAME = ("reward/mean", "length/mean", "mismatch/mean_abs", "actor/entropy", "actor/grad_norm", "advantage/std")


def test_the_step_is_that_of_the_whole_batch(runs: Runs) -> None:
    runs.train("whole", *UNEQUAL)
    runs.train("streamed", *UNEQUAL, "stream={part: 0.5}")
    whole, streamed = rows_of(runs.folder / "whole"), rows_of(runs.folder / "streamed")
    assert [row["stream/ranks"] for row in streamed] == [1, 1, 1], "the slow engine never waits"
    assert all(0.3 < row["stream/share"] < 0.7 and row["stream/busy_s"] > 0 for row in streamed)
    for name in SAME:
        assert streamed[0][name] == pytest.approx(whole[0][name], rel=1e-4, abs=1e-7), name
    assert streamed[2]["actor/grad_norm"] == pytest.approx(whole[2]["actor/grad_norm"], rel=0.05)
