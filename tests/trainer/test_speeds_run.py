"""Runs whose work is divided by the speeds of their devices."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

PLAIN = ("actor.megatron.hidden_dropout=0", "evaluation={every: 0, problems: 2}", "trainer.steps=2")
SAME = ("reward/mean", "length/mean", "actor/loss", "actor/entropy", "actor/grad_norm", "advantage/std")


def test_a_run_has_the_responses_and_weights_of_one_with_even_shares(runs: Runs) -> None:
    runs.train("even", *PLAIN)
    runs.train("by-speed", *PLAIN, "speeds=[1, 0.5]", "guard={straggler_factor: 100}")
    even, by_speed = rows_of(runs.folder / "even"), rows_of(runs.folder / "by-speed")
    assert len(even) == len(by_speed) == 2
    for one, other in zip(even, by_speed, strict=True):
        for name in SAME:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    weights = [load_file(runs.folder / run / "hf" / "model.safetensors") for run in ("even", "by-speed")]
    for name, expected in weights[0].items():
        assert torch.allclose(weights[1][name], expected, rtol=1e-4, atol=1e-5), name
    # a run goes on with other speeds
    runs.train("by-speed", *PLAIN, "speeds=[0.5, 1]", "guard={straggler_factor: 100}", "trainer.steps=3")
    assert len(rows_of(runs.folder / "by-speed")) == 3


def test_replicas_of_a_unit_stream_by_speed(runs: Runs) -> None:
    """Two engines of two ranks, and four replicas: two in each unit."""
    given = (
        "launcher.nproc_per_node=4",
        "rollout.tensor_parallel_size=2",
        "rollout.engine=tests.trainer.unequal_engine.UnequalEngine",
        "rollout.engine_arguments={seconds: 0.08}",
        "run.deterministic=false",
        "trainer.prompts_per_step=6",
        "stream={part: 0.5}",
        "speeds={actor: [1, 0.3, 1, 1], rollout: [1, 1, 0.5, 0.5]}",
    )
    runs.train("streams-by-speed", *PLAIN, *given)
    rows = rows_of(runs.folder / "streams-by-speed")
    assert len(rows) == 2 and all((row["actor/grad_norm"] or 0) > 0 for row in rows)
    assert any((row["stream/ranks"] or 0) > 0 for row in rows)
