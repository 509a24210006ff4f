"""Runs whose idle replica trains on its responses while the other engine decodes."""

from __future__ import annotations

import pytest

from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

UNEQUAL = (
    "rollout.engine=tests.trainer.unequal_engine.UnequalEngine",
    "rollout.engine_arguments={seconds: 0.08}",
    "run.deterministic=false",
    "actor.megatron.hidden_dropout=0",
    "evaluation={every: 0, problems: 1}",
    "trainer.steps=3",
)
SAME = ("reward/mean", "length/mean", "mismatch/mean_abs", "actor/entropy", "actor/grad_norm", "advantage/std")


def test_the_step_is_that_of_the_whole_batch(runs: Runs) -> None:
    runs.train("whole", *UNEQUAL, "trainer.steps=2")
    runs.train("streamed", *UNEQUAL, "trainer.steps=2", "stream={part: 0.5}")
    whole, streamed = rows_of(runs.folder / "whole"), rows_of(runs.folder / "streamed")
    assert [row["stream/ranks"] for row in streamed] == [1, 1], "the slow engine never waits"
    assert all(0.3 < row["stream/share"] < 0.7 and row["stream/busy_s"] > 0 for row in streamed)
    for name in SAME:
        assert streamed[0][name] == pytest.approx(whole[0][name], rel=1e-4, abs=1e-7), name
    assert streamed[1]["actor/grad_norm"] == pytest.approx(whole[1]["actor/grad_norm"], rel=0.05)


def test_replicas_of_two_ranks_stream_their_engines_long_rounds(runs: Runs) -> None:
    """A replica's stages lie on ranks 0 and 2, and each has an engine of its own; short rounds have nothing to stream.

    The long round continues responses of earlier policies, whose tokens the loss corrects.
    """
    layout = ("launcher.nproc_per_node=4", "actor.megatron.pipeline_model_parallel_size=2")
    tail = ("tail={eta_prompts: 1.5, deferred: continue}", "algorithm.correction={weights: token}")
    runs.train("staged", *UNEQUAL, *layout, *tail, "stream={}", "trainer.prompts_per_step=8")
    rows = rows_of(runs.folder / "staged")
    assert [row["tail/long_round"] for row in rows] == [0, 0, 1]
    assert [row["stream/ranks"] for row in rows] == [0, 0, 2]
    assert rows[2]["stream/share"] > 0.2 and rows[2]["tail/continued"] > 0
    assert 0 < rows[2]["correction/weight_mean"] < 1.5


def test_the_drafter_gets_its_steps_and_the_gradient_the_rest(runs: Runs) -> None:
    drafter = ("drafter.kind=eagle", "speculation.drafter=eagle", "speculation.num_speculative_tokens=2")
    spot = ("drafter.entries_per_step=2", "spot.min_entries=1", "spot.min_steps=2")
    runs.train("shared", *UNEQUAL, *drafter, *spot, "stream={}", "rollout.engine_arguments={seconds: 0.2}")
    rows = rows_of(runs.folder / "shared")
    assert all(row["spot/failed"] == row["spot/cut_off"] == 0 and row["drafter/steps"] >= 2 for row in rows)
    assert [row["stream/ranks"] for row in rows] == [0, 0, 1], "the first drafts, in step 2, are the best so far"
    assert all(row["spot/steps"] >= 2 for row in rows)
    assert rows[2]["drafter/entries"] > rows[1]["drafter/entries"], "streamed responses are the drafter's, too"
