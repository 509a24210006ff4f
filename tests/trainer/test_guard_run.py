"""Runs with a bad step: it is skipped, or the run goes back; both end with finite weights, the same every time."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.observe.metrics import read_metrics
from megatron_tlt.rollout.replay import read_recording
from tests.helpers.launch import run_logged
from tests.trainer.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# the engine's log-probs are the old policy's, so that impossible ones make the ratio infinite
SETTINGS = (
    "rollout.engine=tests.trainer.bad_engine.BadEngine",
    "rollout.vllm=null",
    "speculation.enabled=false",
    "reshard.method=none",
    "algorithm.correction.bypass=true",
    "trainer.steps=5",
    "trainer.save_every=2",
)


def engine(**arguments: object) -> str:
    return f"rollout.engine_arguments={json.dumps(arguments)}"


def rows_of(folder: Path) -> dict[int, dict[str, float | None]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {int(row["step"] or 0): row for row in rows}


def weights(folder: Path) -> bytes:
    file = folder / "hf" / "model.safetensors"
    assert all(torch.isfinite(tensor).all() for tensor in load_file(file).values())
    return file.read_bytes()


def test_a_bad_step_stops_the_run_unless_it_is_skipped_and_its_responses_can_be_replayed(runs: Runs) -> None:
    bad = (*SETTINGS, "actor.lr_warmup_steps=20", engine(bad=[3]))
    said = runs.train("bad", *bad, "trainer.async_save=false", expect_status=1)
    assert "gradient norm nan" in said and not (runs.folder / "bad" / "guard").exists()
    said = runs.train("bad", *bad, "guard.on_nonfinite=skip")
    assert "from the checkpoint of step 2" in said and "step 5, update 1: gradient norm nan" in said

    skipped = (*bad, "guard.on_nonfinite=skip", "trainer.mini_batches=2", "trainer.keep_checkpoints=4")
    said = runs.train("skipped", *skipped)
    folder = runs.folder / "skipped"
    assert "step 3, update 1: gradient norm nan" in said and "the update is skipped; its responses are in" in said
    rows = rows_of(folder)
    assert len(rows) == 5 and rows[3]["guard/skipped"] == 2, "rank 1 has samples in both mini-batches"
    assert all(rows[step]["guard/skipped"] == 0 for step in (1, 2, 4, 5))
    assert rows[4]["actor/lr"] == pytest.approx(1e-3 * 5.5 / 20), "it counts applied updates: the fifth and sixth"
    weights(folder)
    kept = folder / "guard" / "step_000003"
    verdict = json.loads((kept / "verdict.json").read_text())
    assert verdict["updates"][0]["decision"] == "skip" and verdict["updates"][0]["norm"] is None
    vocab = json.loads((folder / "hf" / "config.json").read_text())["vocab_size"]
    assert sum(map(len, read_recording(kept, vocab).values())) == 16
    replay = [*runs.command("skipped", command="replay")[:3], "replay", str(folder), "--step", "3"]
    assert "gradient norm nan" in run_logged(replay, timeout_s=600, expect_status=1)


def test_a_run_goes_back_and_goes_on_with_other_problems(runs: Runs) -> None:
    back = (*SETTINGS, "guard.on_nonfinite=go_back", engine(bad=[4]), "observe.recording=true")
    found = []
    for name in ("back", "back-again"):
        said = runs.train(name, *back)
        assert "the run goes back to its newest checkpoint" in said and "back at the checkpoint of step 2" in said
        found.append(weights(runs.folder / name))
    assert found[0] == found[1]
    rows = rows_of(runs.folder / "back")
    assert [rows[step]["guard/went_back"] for step in rows] == [0, 0, 1, 1, 1]
    assert all(math.isfinite(row["actor/grad_norm"] or math.nan) for row in rows.values())
    state = json.loads((runs.folder / "back" / "checkpoints" / "step_000005" / "state.json").read_text())
    assert state["problems_drawn"] == 4 * (5 + 2), "those of the steps that were undone are left out"
    assert state["guard"]["returns"] == 1 and state["guard"]["in_a_row"] == 0


def test_a_stop_after_going_back_keeps_what_was_decided(runs: Runs) -> None:
    given = (*SETTINGS, "guard.on_nonfinite=go_back", engine(bad=[4], stopped=[5]))
    said = runs.train("stopped", *given, expect_status=128 + signal.SIGTERM)
    assert "back at the checkpoint of step 2" in said and "after 2 steps, state saved" in said
    state = json.loads((runs.folder / "stopped" / "checkpoints" / "step_000002" / "state.json").read_text())
    assert state["problems_drawn"] == 4 * (2 + 2), "those of the steps that were undone are left out"
    assert state["guard"]["returns"] == 1 and state["guard"]["in_a_row"] == 1


def test_a_rank_that_is_killed_after_going_back_goes_on_from_memory(runs: Runs) -> None:
    elastic = ("guard.on_nonfinite=go_back", "elastic={}", "trainer.curriculum={decay: 0.5}")
    runs.train("whole", *SETTINGS, *elastic, engine(bad=[4]))
    # steps 1 to 3, the bad one, steps 3 and 4 again: the kill is in the second step after going back
    said = runs.train("killed", *SETTINGS, *elastic, engine(bad=[4], killed=[6]))
    assert "back at the checkpoint of step 2" in said and "resumed from the snapshot of step 3 in memory" in said
    states = []
    for name in ("whole", "killed"):
        file = runs.folder / name / "checkpoints" / "step_000005" / "state.json"
        states.append(json.loads(file.read_text()))
        assert list(rows_of(runs.folder / name)) == [1, 2, 3, 4, 5]
    assert states[0] == states[1] and states[0]["problems_drawn"] == 4 * (5 + 2)
    assert weights(runs.folder / "whole") == weights(runs.folder / "killed")


def test_a_run_that_goes_back_without_progress_stops(runs: Runs) -> None:
    given = ("guard={on_nonfinite: go_back, most_in_a_row: 2}", engine(bad=[4, 6]))
    said = runs.train("stuck", *SETTINGS, *given, expect_status=3)
    assert "2 bad updates in a row, guard.most_in_a_row; the run stops" in said
    assert "restart" not in said


def test_a_slow_rank_is_named(runs: Runs) -> None:
    given = ("guard={straggler_factor: 3.0, straggler_steps: 2}", engine(slow_s=0.2), "trainer.steps=3")
    said = runs.train("slow", *SETTINGS, *given)
    assert "rank 1 (" in said and "is slow in rollout: " in said
    assert all((row["guard/slowest_rank_ratio"] or 0) > 3 for row in rows_of(runs.folder / "slow").values())
