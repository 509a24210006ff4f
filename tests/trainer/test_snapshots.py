"""Snapshots in memory restore the same bits, under other layouts the same curve, and never what is damaged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.actor.conftest import models, rows_of
from tests.trainer.workers.snapshots import CASES

__all__ = ["models"]  # a fixture

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "snapshots.py"


@pytest.fixture(scope="module")
def rows(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rows_of(WORKER, models, tmp_path_factory.mktemp("snapshots"))


def test_a_process_that_died_goes_on_with_the_same_bits(rows: dict[str, dict[str, Any]]) -> None:
    found = {name: row["resume_is_bit_equal"] for name, row in rows.items() if name in CASES}
    assert len(found) == len(CASES) and all(found.values()), found
    assert all(rows[name]["state"] == [2, 20] for name in CASES)


def test_it_goes_on_under_another_layout(rows: dict[str, dict[str, Any]]) -> None:
    others = {name: row for name, row in rows.items() if "other_losses" in row}
    assert set(others) == {"tp2sp", "dp2", "pp2-muon"}
    for name, row in others.items():
        tolerance = 1e-3 if "muon" in name else 1e-5  # Muon's iteration in bfloat16 amplifies rounding
        assert row["other_losses"] == pytest.approx(row["losses"], rel=tolerance), name


def test_one_whole_snapshot_remains_while_the_next_is_written(rows: dict[str, dict[str, Any]]) -> None:
    for name in CASES:
        assert (rows[name]["kept_while_writing"], rows[name]["newest"]) == (2, 3), name
        assert rows[name]["older_than_checkpoint"] is None, name


@pytest.mark.parametrize("slot", ["first", "second"])
def test_a_slot_is_made_before_it_is_used(slot: str, rows: dict[str, dict[str, Any]]) -> None:
    assert all(rows[name][f"{slot}_slot_made"] for name in CASES)


def test_what_is_damaged_or_incomplete_is_not_loaded(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["broken"] == {"incomplete": 2, "flipped": 1, "forgotten": None, "newest_step": [3, 0]}


def test_what_lies_beside_the_blocks_is_verified(rows: dict[str, dict[str, Any]]) -> None:
    found = rows["beside"]
    assert found.pop("step") == 1 and len(found) == 2 and not any(found.values())


def test_short_memory_of_one_rank_ends_the_snapshots_of_all_and_nothing_else(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["short"] == {"copy": 1, "part": 1}


def test_parts_of_two_saves_of_a_step_are_no_snapshot(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["mixed"] == {"alone": 1, "mixed": None}


def test_a_slot_takes_what_is_planned(rows: dict[str, dict[str, Any]], models: Path) -> None:
    with safe_open(models / "dense" / "model.safetensors", "pt") as file:
        weights = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    # weights on both ranks, of float32 weights and two moments a half; aligned to 64 bytes
    assert rows["dp2"]["bytes"] == pytest.approx(weights * (4 + 12 / 2), rel=0.01)
    assert rows["dp2-bf16"]["bytes"] == pytest.approx(weights * (2 + 12 / 2), rel=0.01)


def test_a_lost_node_is_replaced_from_its_buddys_copy(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["nodes"]
    assert row["copies"] == ["parts_00000", "parts_00001", "rank_00000", "rank_00001"]
    assert row["step"] == 3 and row["resume_is_bit_equal"]
    assert row["copies_after"] == ["rank_00000", "rank_00001"], "the new node has second copies again"
    assert row["other_step"] == 3, "under another layout too"
    assert row["flipped_copy"] is None, "each node verifies the copies that it uses"
    assert row["both_lost"] is None
