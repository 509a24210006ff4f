"""A skipped update leaves the policy as it was, under Megatron's optimizer and under those of whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.actor.conftest import rows_of
from tests.actor.workers.guard import CASES

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "workers" / "guard.py"


@pytest.fixture(scope="module")
def rows(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rows_of(WORKER, models, tmp_path_factory.mktemp("guard"))


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_update_leaves_every_bit_and_the_next_one_is_that_of_a_run_without_it(
    rows: dict[str, dict[str, Any]], name: str
) -> None:
    row = rows[name]
    assert row["judged_as_unjudged"]
    assert row["decisions"] == ["accept", "accept", "skip", "skip", "skip", "accept"]
    assert row["nan_norm"] == "nan" and row["inf_norm"] in ("nan", "inf") and float(row["spike_norm"]) > 1.0
    for bad in ("nan", "inf", "spike"):
        assert row[f"{bad}_unchanged"], bad
    assert row["norms_unchanged"]
    assert row["next_norm_equal"] and row["next_equal"]


@pytest.mark.parametrize("name", CASES)
def test_without_a_judge_it_stops_the_run(rows: dict[str, dict[str, Any]], name: str) -> None:
    assert rows[name]["stopped"] == "gradient norm nan; it must be finite; the last checkpoint is unaffected"


@pytest.mark.parametrize("name", ["adam", "adam-overlap-bf16", "nadam"])
def test_the_two_halves_of_a_step_are_megatrons_step(rows: dict[str, dict[str, Any]], name: str) -> None:
    assert rows[name]["megatrons_step_equal"]
