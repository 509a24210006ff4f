"""Which node of a launch loses its part for a slow rank, after others were lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from megatron_tlt.platform.membership import LaunchMember, LaunchRound, left_out_nodes
from megatron_tlt.trainer.node_changes import NodeChanges


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a launch whose node 0 is lost; this process is a rank on node 2."""
    monkeypatch.setenv("TLT_NODE_RANK", "2")
    members = tuple(LaunchMember(index, f"10.0.0.{index}", 8) for index in (1, 2))
    (tmp_path / "round-00001" / "published").mkdir(parents=True)
    (tmp_path / "round-00001" / "published" / "members.json").write_bytes(msgspec.json.encode(LaunchRound(1, members)))
    return tmp_path


def test_the_node_of_a_slow_rank_is_left_out_once(folder: Path) -> None:
    nodes = NodeChanges(folder, least=8)
    assert nodes.look() == ""
    assert nodes.look([0]) == "node 2 is left out, because it is slow,"
    assert left_out_nodes(folder) == {2}
    assert nodes.look([0]) == ""


def test_it_stays_if_too_few_devices_would_be_left(folder: Path) -> None:
    assert NodeChanges(folder, least=9).look([0]) == "" and left_out_nodes(folder) == set()
