"""Optimizers of whole tensors step as plain torch does, under every layout, and resume under another one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.actor.conftest import rows_of
from tests.actor.workers.whole_tensors import CASES, ONLY_UNDER, RESUME, STAND_INS

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "whole_tensors.py"

OF_FOUR = ["muon", "learned", "coupled"]
Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def saved_by_four(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    """The folder of a run on four ranks, with its checkpoints, and its rows."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, rows_of(WORKER, models, folder, 4, *OF_FOUR)


@pytest.fixture(scope="module", params=[2, 4])
def rows(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Rows:
    if request.param == 4:
        found: Rows = request.getfixturevalue("saved_by_four")[1]
        return found
    return rows_of(WORKER, models, tmp_path_factory.mktemp("whole"), 2, *STAND_INS)


def check_steps(rows: Rows) -> None:
    for name, row in rows.items():
        assert row["losses"][-1] != row["losses"][0], name
        # the first step's gradients and their norm are those of Hugging Face's model in one process
        assert row["gradient_off"] <= (5e-2 if "bf16" in name else 1e-5), (name, row["gradient_off"])
        # under bf16 the owners' float32 weights are exact, and the model's are rounded from them
        assert row["distance"] <= (4e-3 if "bf16" in name else 1e-6), name
        assert (row["owners"] > 1) == (not name.startswith(("coupled", "pylo-velo"))), name


def check_resumes(rows: Rows) -> None:
    for kind in ("fresh_is_bit_equal", "resume_is_bit_equal"):
        found = {name: row[kind] for name, row in rows.items() if kind in row}
        assert found and all(found.values()), (kind, found)


def test_five_steps_equal_plain_torch_on_whole_tensors(rows: Rows) -> None:
    assert {name.split()[0] for name in rows} in (set(STAND_INS), set(OF_FOUR))
    check_steps(rows)


def test_resumed_they_go_on_bit_for_bit(rows: Rows) -> None:
    check_resumes(rows)


def tolerance(name: str) -> float:
    """Of losses after a resume under another layout, relative.

    Layouts round gradients differently; Muon's iteration in bfloat16 and SOAP's eigenvectors amplify that.
    """
    return 1e-3 if name.startswith(("muon", "soap")) else 1e-5


def check_resharded(rows: Rows) -> None:
    """The state is loaded exactly, and steps from it by plain torch on equal gradients."""
    for name, row in rows.items():
        assert row["resharded_state_is_equal"], name
        assert row["resharded_distance"] <= 1e-6, name
        assert row["resharded_losses"] == pytest.approx(row["losses"][2:], rel=tolerance(name)), name


def test_saved_under_one_layout_they_resume_under_another(rows: Rows) -> None:
    resharded = {name: row for name, row in rows.items() if "resharded_losses" in row}
    of_two = {f"{name} {layout}" for layout in ("tp2", "ep2") for name in ONLY_UNDER[layout] if name in STAND_INS}
    assert resharded.keys() in (of_two, {f"{name} tp2pp2sp" for name in OF_FOUR})
    check_resharded(resharded)


def test_saved_by_four_ranks_they_resume_on_two(models: Path, saved_by_four: tuple[Path, Rows], tmp_path: Path) -> None:
    folder, saved = saved_by_four
    resumed = rows_of(WORKER, models, tmp_path, 2, f"{RESUME}{folder}", *OF_FOUR)
    for name in OF_FOUR:
        row, before = resumed[name], saved[f"{name} tp2pp2sp"]
        assert row["state"] == before["state"], name
        assert row["losses"] == pytest.approx(before["losses"][2:], rel=tolerance(name)), name


@pytest.mark.skipif(
    importlib.util.find_spec("pylo") is None,
    reason="PyLO is not installed (from source: the package of that name on the index is another one)",
)
def test_pylo_runs_by_import_path(models: Path, tmp_path: Path) -> None:
    names = [name for name in CASES if name.startswith("pylo-")]
    rows = rows_of(WORKER, models, tmp_path, 2, *names)
    check_steps(rows)
    check_resumes(rows)
    resharded = {name: row for name, row in rows.items() if "resharded_losses" in row}
    assert resharded.keys() == {f"{name} tp2" for name in names if name in ONLY_UNDER["tp2"]} and resharded
    check_resharded(resharded)
