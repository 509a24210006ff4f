"""A drafter that is trained in a run: newest in every engine, harmless when it fails, the same after a kill."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_tlt.drafter.checkpoint import STATE
from megatron_tlt.observe.metrics import read_metrics
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


def of_kind(kind: str) -> tuple[str, str]:
    return f"drafter.kind={kind}", f"speculation.drafter={kind}"


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
    assert all(0 <= row["speculation/accepted_at_1"] <= 1 for row in rows)
    assert all(row["speculation/acceptance_length_long"] >= 1 for row in rows)


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


def test_from_a_megatron_checkpoint_it_starts_from_the_policys_last_layer(runs: Runs, eagle: Path) -> None:
    checkpoint = max((eagle / "checkpoints").glob("step_*"))
    model = ("model.recipe=null", f"model.path={checkpoint}", "actor.megatron.pipeline_model_parallel_size=2")
    runs.train("onward", *OVERRIDES, *of_kind("eagle"), *model, "trainer.steps=1")
    first = load_file(runs.folder / "onward" / "drafter" / "first" / "model.safetensors")
    target = load_file(eagle / "hf" / "model.safetensors")
    of_layer = [name for name in first if name.startswith("layers.0.")]
    assert of_layer
    assert all(first[name].equal(target[name.replace("layers.0", "model.layers.1")].float()) for name in of_layer)


def test_a_head_warmed_up_on_the_targets_own_answers_starts_a_run(runs: Runs) -> None:
    tool, out = REPOSITORY / "tools" / "warmup_drafter.py", runs.folder / "warm"
    options = ("--kind", "eagle", "--responses", "32", "--steps", "3", "--entries-per-step", "4", "--out", str(out))
    run_logged([python(), str(tool), "--config", str(runs.config), *options], timeout_s=300)
    assert len((out / "sampled.jsonl").read_text().splitlines()) == 32
    runs.train("warmed", *OVERRIDES, *of_kind("eagle"), f"drafter.path={out / 'drafter'}", "trainer.steps=1")
    folders = (out / "drafter", runs.folder / "warmed" / "drafter" / "first")
    written, first = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(first[name].equal(tensor.float()) for name, tensor in written.items())
