"""A drafter that is trained in a run: newest in every engine, harmless when it fails, the same after a kill."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_tlt.drafter.checkpoint import STATE
from megatron_tlt.observe.metrics import read_metrics
from megatron_tlt.platform.files import temporary_sibling
from tests.helpers.launch import REPOSITORY, python, run_logged
from tests.trainer.conftest import Runs
from tests.trainer.test_run import wait_for_rows, weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SESSION = 5
OVERRIDES = (
    "trainer.steps=3",
    f"drafter.session_steps={SESSION}",
    "drafter.entries_per_step=4",
    "speculation.num_speculative_tokens=2",
)


def steps(run: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if row["step"]]


def drafter(run: Path) -> Path:
    newest = max((run / "checkpoints").glob("step_*"))
    return newest / "drafter" / "rank_00000" / STATE


def of_kind(kind: str) -> tuple[str, ...]:
    """EAGLE-3 with a part of the vocabulary, which the first session chooses."""
    reduced = ("drafter.draft_vocab_size=48",) if kind == "eagle3" else ()
    return (f"drafter.kind={kind}", f"speculation.drafter={kind}", *reduced)


@pytest.fixture(scope="module")
def eagle(runs: Runs) -> Path:
    """A run from start to end."""
    runs.train("eagle", *OVERRIDES, *of_kind("eagle"))
    return runs.folder / "eagle"


@pytest.fixture(scope="module")
def eagle3(runs: Runs) -> Path:
    runs.train("eagle3", *OVERRIDES, *of_kind("eagle3"))
    return runs.folder / "eagle3"


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_step_trains_it_and_the_next_rollout_has_it(kind: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(kind)
    rows = steps(run)
    # a rollout with an older version would have ended the run
    assert [row["drafter/version"] for row in rows] == [SESSION, 2 * SESSION, 3 * SESSION]
    first, newest = (load_file(run / "drafter" / at / "model.safetensors") for at in ("first", "newest"))
    assert first.keys() == newest.keys()
    assert all(not newest[name].equal(tensor) and newest[name].isfinite().all() for name, tensor in first.items())
    assert all(row["drafter/entries"] > 0 and row["drafter/failed"] == 0 for row in rows)
    # the first rollout's drafter is a guess that was made from the target: it is not drafted with
    assert [row["speculation/draft_tokens"] > 0 for row in rows] == [False, True, True]
    assert [row.get("speculation/drafter_withheld") for row in rows] == [1.0, None, None]
    assert all(0 <= row["speculation/accepted_at_1"] <= 1 for row in rows[1:])
    assert all(row["speculation/acceptance_length_long"] >= 1 for row in rows)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_at_the_end_it_is_held_against_the_drafter_of_the_start(kind: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(kind)
    names = {"drafter/frozen_acceptance_length", "drafter/adapted_acceptance_length"}
    assert [len(names & row.keys()) for row in steps(run)] == [0, 0, 2]
    found = json.loads((run / "summary.json").read_text())["speculation"]
    assert [found[f"{which}_acceptance_length"] for which in ("frozen", "adapted")] == [
        steps(run)[-1][f"drafter/{which}_acceptance_length"] for which in ("frozen", "adapted")
    ]
    # not the guess that it is made from: a folder of its own, from after the first step's training
    frozen = load_file(run / "drafter" / "first_trained" / "model.safetensors")
    guess, newest = (load_file(run / "drafter" / at / "model.safetensors") for at in ("first", "newest"))
    for other in (guess, newest):
        assert any(not tensor.equal(other[name]) for name, tensor in frozen.items())
    assert 1.0 <= found["frozen_acceptance_length"] <= 3.0 and 1.0 <= found["adapted_acceptance_length"] <= 3.0


def test_a_session_that_is_not_finite_keeps_the_last_good_drafter_and_the_run_goes_on(runs: Runs) -> None:
    log = runs.train("diverged", *OVERRIDES, *of_kind("eagle"), "drafter.lr=1e30", "drafter.clip_grad=0")
    rows = steps(runs.folder / "diverged")
    assert len(rows) == 3
    assert [row["drafter/failed"] for row in rows] == [1, 1, 1]
    assert [row["drafter/version"] for row in rows] == [0, 0, 0]
    assert "ended with non_finite" in log + (runs.folder / "diverged" / "logs" / "workers.log").read_text()
    first = load_file(runs.folder / "diverged" / "drafter" / "first" / "model.safetensors")
    kept = load_file(drafter(runs.folder / "diverged"))
    assert all(kept[f"parameters/{name}"].equal(tensor) for name, tensor in first.items())


def test_killed_and_started_again_it_ends_with_the_same_bits(runs: Runs, eagle: Path) -> None:
    process = runs.start("cut", *OVERRIDES, *of_kind("eagle"), fresh=False)
    wait_for_rows(runs, "cut", 1, process, checkpoints=1)
    time.sleep(0.2)
    runs.kill("cut")
    process.wait()
    runs.train("cut", *OVERRIDES, *of_kind("eagle"))
    assert weights(runs.folder / "cut") == weights(eagle)
    expected, found = (load_file(drafter(run)) for run in (eagle, runs.folder / "cut"))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


def test_killed_after_the_newest_checkpoints_data_expired_it_ends_with_the_same_bits(runs: Runs) -> None:
    """It saves after step 3; step 4 trains on the responses of steps 3 and 4, and in step 5 those of 3 expire."""
    overrides = (*OVERRIDES, *of_kind("eagle"), "trainer.steps=6", "trainer.save_every=3", "drafter.buffer.max_age=1")
    runs.train("expiring", *overrides)
    process = runs.start("expired", *overrides, fresh=False)
    wait_for_rows(runs, "expired", 5, process, checkpoints=1)
    runs.kill("expired")
    process.wait()
    folder = runs.folder / "expired"
    assert [checkpoint.name for checkpoint in (folder / "checkpoints").glob("step_*")] == ["step_000003"]
    runs.train("expired", *overrides)
    assert "are missing" not in (folder / "logs" / "workers.log").read_text()
    assert weights(folder) == weights(runs.folder / "expiring")
    expected, found = (load_file(drafter(run)) for run in (runs.folder / "expiring", folder))
    assert expected.keys() == found.keys() and all(expected[name].equal(found[name]) for name in expected)


def test_from_a_megatron_checkpoint_it_starts_from_the_policys_last_layer(runs: Runs, eagle: Path) -> None:
    checkpoint = max((eagle / "checkpoints").glob("step_*"))
    model = ("model.recipe=null", f"model.path={checkpoint}", "actor.megatron.pipeline_model_parallel_size=2")
    runs.train("onward", *OVERRIDES, *of_kind("eagle"), *model, "trainer.steps=1")
    first = load_file(runs.folder / "onward" / "drafter" / "first" / "model.safetensors")
    target = load_file(eagle / "hf" / "model.safetensors")
    of_layer = {name for name in first if name.startswith("layers.0.")}
    of_output = {name for name in of_layer if "o_proj" in name or "down_proj" in name}
    assert len(of_output) == 2 < len(of_layer)
    assert not any(first[name].any() for name in of_output)
    for name in of_layer - of_output:
        assert first[name].equal(target[name.replace("layers.0", "model.layers.1")].float()), name


def test_a_head_warmed_up_on_the_targets_own_answers_starts_a_run(runs: Runs) -> None:
    tool, out = REPOSITORY / "tools" / "warmup_drafter.py", runs.folder / "warm"
    options = ("--kind", "eagle", "--responses", "32", "--steps", "3", "--entries-per-step", "4", "--out", str(out))
    run_logged([python(), str(tool), "--config", str(runs.config), *options], timeout_s=300)
    assert len((out / "sampled.jsonl").read_text().splitlines()) == 32
    runs.train("warmed", *OVERRIDES, *of_kind("eagle"), f"drafter.path={out / 'drafter'}", "trainer.steps=1")
    folders = (out / "drafter", runs.folder / "warmed" / "drafter" / "first")
    written, first = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(first[name].equal(tensor.float()) for name, tensor in written.items())
    (row,) = steps(runs.folder / "warmed")
    assert row["speculation/draft_tokens"] > 0, "it was trained, so the first rollout drafts with it"


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below ``folder`` but the logs: when it was written, and what it holds."""
    files = [p for p in folder.rglob("*") if p.is_file() and "logs" not in p.relative_to(folder).parts]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def test_evaluating_a_run_that_goes_on_leaves_its_folder_as_it_is(runs: Runs, eagle: Path) -> None:
    """As ``tlt eval`` finds it in the middle of a save and of a row, with data beyond the newest checkpoint."""
    live = runs.folder / "live"
    shutil.copytree(eagle, live)
    shutil.rmtree(live / "checkpoints" / "step_000003")
    (live / "checkpoints" / "latest").write_text("step_000002\n")
    saving = temporary_sibling(live / "checkpoints" / "step_000003")
    saving.mkdir()
    (saving / "state.json").write_text("{}")
    for data in (live / "drafter").glob("data-*"):
        temporary_sibling(data / "0.entry").write_bytes(b"half")
    for rows in live.glob("timeline.rank*.jsonl"):
        rows.write_bytes(rows.read_bytes() + b'{"na')
    before = content(live)
    assert any(name.endswith(".entry") for name in before)
    said = runs.evaluate("live", *OVERRIDES, *of_kind("eagle"))
    assert f"evaluated {live}/checkpoints/step_000002 (after step 2)" in said
    assert "are missing" not in said + (live / "logs" / "workers.log").read_text()
    assert content(live) == before
