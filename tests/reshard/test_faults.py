"""Resharding between a real actor and real engines that goes wrong: the named error, and no engine in use after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2
from tests.reshard.workers.faults import LOST

WORKER = Path(__file__).parent / "workers" / "faults.py"


def said(log: str, word: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith(word)]


@pytest.mark.distributed
def test_a_missing_mapping_and_a_flipped_bit_are_named_on_all_ranks(tmp_path: Path) -> None:
    model = build_qwen2(tmp_path / "model", num_kv_heads=2)
    log = run_torchrun(WORKER, 2, [str(model), ""], timeout_s=120)
    missing, flipped = said(log, "ENDED missing"), said(log, "ENDED flipped")
    assert len(missing) == len(flipped) == 2, log[-3000:]
    expected = f"{LOST}, entry 0: rank 0 needs it, but no rank holds it (actor TP2 to engines TP1 x 2)"
    assert all(expected in line for line in missing), missing
    assert all("in the engine, rank 1 sent" in line and "stale or damaged" in line for line in flipped), flipped
    assert len(said(log, "REFUSED flipped")) == 2, "an engine generated from damaged weights"
    assert not said(log, "UNNOTICED")
    # before anything was written the engines are whole: they may go on
    assert len(said(log, "GENERATED missing")) == 2


@pytest.mark.representative("fault during a reshard")
@pytest.mark.distributed
def test_a_rank_killed_in_mid_transfer_leaves_no_engine_in_use(tmp_path: Path) -> None:
    model = build_qwen2(tmp_path / "model", num_kv_heads=2)
    # without imports, for all of this folder: actor and engine in one process, in the order a worker imports them
    log = run_torchrun(WORKER, 2, [str(model), "kill"], timeout_s=120, expect_status=1, fresh=True)
    ended, refused = said(log, "ENDED killed rank 0"), said(log, "REFUSED killed rank 0")
    assert len(ended) == len(refused) == 1, log[-3000:]
    assert "with rank 1 broke off" in ended[0]
    assert "old and new weights mixed" in ended[0]
    assert "half-written" in refused[0]
