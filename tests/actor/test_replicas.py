"""Replicas of a real policy are equal after updates under every layout; one flipped bit names its rank and tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.platform.nodes import node_name
from tests.actor.conftest import rows_of

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "replicas.py"
REPLICAS = {
    "dp4": {"0", "1", "2", "3"},
    "dp4-overlap": set(),  # weights are gathered again before every use, which puts the bit back
    "dp4-bf16": {"0", "1", "2", "3"},
    "dp4-lora": {"0", "1", "2", "3"},
    "tp2dp2": {"0", "2"},
    "cp2dp2": {"0", "1", "2", "3"},
    "moe-ep2": {"0", "1", "2", "3"},
    "moe-ep4": {"0", "1", "2", "3"},
}
"""By layout, the ranks whose weights are compared with those of the rank that flips a bit."""


@pytest.fixture(scope="module")
def rows(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rows_of(WORKER, models, tmp_path_factory.mktemp("replicas"), processes=4)


def test_replicas_are_equal_after_updates(rows: dict[str, dict[str, Any]]) -> None:
    assert set(rows) == set(REPLICAS)
    assert {name for name, row in rows.items() if not row["equal"]} == set()


def test_a_flipped_bit_names_rank_and_tensor(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        found, expected = row["dense"], REPLICAS[name]
        if not expected:
            assert found["odd"] == {} and found["errors"] == [""], name
            continue
        proven = len(expected) > 2
        named = {"2"} if proven else expected
        assert found["odd"] == {rank: [[found["tensor"]], proven] for rank in named}, name
        (message,) = found["errors"]
        assert "after step 3" in message, message
        for rank in named:
            assert f"rank {rank} on {node_name()} in {found['tensor']}" in message
        assert ("sbatch --exclude" in message) is proven and ("no majority" in message) is not proven


def test_experts_have_replicas_of_their_own(rows: dict[str, dict[str, Any]]) -> None:
    found = rows["moe-ep2"]["experts"]
    assert ".experts." in found["tensor"]
    assert found["odd"] == {rank: [[found["tensor"]], False] for rank in ("0", "2")}
    assert rows["moe-ep4"]["experts"] | {"tensor": ""} == {"tensor": "", "odd": {}, "errors": [""]}
    assert {name for name, row in rows.items() if not row["experts_compared"]} == {"moe-ep4"}
