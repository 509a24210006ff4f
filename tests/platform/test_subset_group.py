"""Groups over some ranks: made by these alone, broken by a death at once, given up when a member hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launch import run_torchrun

WORKER = Path(__file__).parent / "workers" / "subsets.py"


@pytest.mark.distributed
def test_groups_form_reduce_hang_and_break_without_the_other_ranks(tmp_path: Path) -> None:
    run_torchrun(WORKER, 3, [str(tmp_path)], timeout_s=90, expect_status=None)
    found = {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 2)}
    assert found[0]["pair"] == found[2]["pair"] == {"sum": [2.0, 4.0], "plain": {"from": 2}}
    assert found[0]["again"] == found[2]["again"] == {"same": True, "sum": [4.0, 8.0]}, "the connection serves twice"
    assert found[0]["mended"] == found[2]["mended"] == {"same": False, "sum": [2.0, 2.0, 2.0]}
    # who went before the last had come took the group along, for the one that came after it too
    assert found[0]["gone"].startswith("Abandoned: group gone was abandoned: its session is over")
    assert found[2]["gone"].startswith("Abandoned: group gone was abandoned: a member has left")
    assert found[0]["alone"].startswith("Abandoned: group alone was abandoned: not all 2 members arrived within 0.3 s")
    # a member that is late in connecting, and in a collective
    assert found[0]["late"].startswith("Abandoned: group late was abandoned: a member does not connect")
    assert found[0]["hang"].startswith("Abandoned: a collective over ranks [0, 2] was abandoned: its session is over")
    assert found[0]["waited_s"] < 5
    # one that dies in it
    assert found[0]["death"].startswith("GroupFailed: a collective over ranks [0, 1] failed")
