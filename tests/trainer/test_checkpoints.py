"""Saves in the background: what they hold, and that none of their failures costs a checkpoint or hangs a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import mounted
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "checkpoints.py"


def run(folder: Path, hidden_size: int, *cases: str, timeout_s: int = 120) -> dict[str, Any]:
    """What each of the worker's cases found; each has a folder of its own below ``folder``."""
    model = build_qwen2(folder / "model", hidden_size=hidden_size, num_kv_heads=2, scale=0.1)
    run_torchrun(WORKER, 2, [str(model), str(folder), str(timeout_s), *cases], timeout_s=180)
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # large enough that the writers are still at work when something is done to them
    return run(tmp_path_factory.mktemp("checkpoints"), 512, "snapshot", "killed_writer", "dropout")


def test_what_is_written_is_the_state_at_the_save(found: dict[str, Any]) -> None:
    case = found["snapshot"]
    assert case["held"] and case["unfinished"], "the writers were done before anything changed"
    assert case["changed"] > 0
    assert case["differing"] == 0


def test_killed_writing_process_is_an_error_on_all_ranks(found: dict[str, Any]) -> None:
    case = found["killed_writer"]
    assert case["said"][0] == case["said"][1] and "was not written" in case["said"][0]
    assert case["left"] == []


def test_with_dropout_a_resumed_policy_goes_on_bit_for_bit_because_of_the_random_states(found: dict[str, Any]) -> None:
    case = found["dropout"]
    assert case["with"] == 0
    assert case["without"] > case["tensors"] / 2


def test_random_states_of_another_layout_are_left_alone_with_a_warning(found: dict[str, Any]) -> None:
    case = found["dropout"]["other_layout"]
    assert case["kept"]
    assert "warning: " in case["said"] and "they are initialized anew" in case["said"]


def test_full_disk_at_any_stage_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    with mounted(tmp_path / "full_disk", "16m") as disk:
        *refused, last = run(tmp_path, 64, "full_disk")["full_disk"]["rows"]
    for row in refused:
        first, second = row["said"]
        assert first == second and first.startswith(f"disk full: cannot write {disk}/checkpoints/"), row
        assert row["left"] == ["latest", "step_000001"] and row["latest"] == "step_000001\n", row
    assert last == {"said": ["nothing", "nothing"], "latest": "step_000002\n"}


def test_hashing_longer_than_a_collective_may_take_is_shared_and_ends_no_run(tmp_path: Path) -> None:
    case = run(tmp_path, 64, "slow_hash", timeout_s=6)["slow_hash"]
    assert case["step"] == 3 and case["converted"] == []
    first, second = case["hashed"]
    assert first and second and not set(first) & set(second)
    assert {"common.pt", "state.json", ".metadata"} < {*first, *second}


def test_file_system_that_fails_in_the_publishing_thread_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    case = run(tmp_path, 64, "publishing_fails")["publishing_fails"]
    first, second = case["said"]
    assert first == second and "Input/output error" in first
    assert case["left"] == []
