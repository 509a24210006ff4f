"""A gradient that comes in parts is that of the whole batch, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.actor.conftest import rows_of

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "accumulation.py"


@pytest.fixture(scope="module")
def rows(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rows_of(WORKER, models, tmp_path_factory.mktemp("accumulation"), processes=4)


def test_parts_take_the_step_of_the_whole_batch(rows: dict[str, dict[str, Any]]) -> None:
    from tests.actor.workers.accumulation import LAYOUTS

    assert set(rows) == set(LAYOUTS)
    assert {name: row["error"] for name, row in rows.items() if not row["error"] < 1e-6} == {}
    # of single tensors: some gradients are small differences of large numbers
    assert {name: row["worst"] for name, row in rows.items() if not row["worst"] < 1e-5} == {}


def test_parts_report_what_the_whole_batch_does(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        for expected, found in zip(row["expected"], row["found"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), name
