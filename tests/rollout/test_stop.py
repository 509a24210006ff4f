"""Ranks of one engine stop after the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.rollout.stop import StopAgreement
from tests.helpers.launch import run_torchrun, slowness

WORKER = Path(__file__).parent / "workers" / "stop.py"


@pytest.mark.distributed
def test_a_signal_to_one_rank_stops_both_after_the_same_step_within_seconds(tmp_path: Path) -> None:
    run_torchrun(WORKER, 2, [str(tmp_path)], timeout_s=90)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["stopped"] for rank in ranks)
    assert ranks[0]["step"] == ranks[1]["step"] > 10
    assert max(rank["seconds"] for rank in ranks) < 5 * slowness()


def test_an_engine_of_one_rank_asks_after_every_step() -> None:
    asked = [False, False, True]
    stop = StopAgreement(iter(asked).__next__, None)
    assert [stop() for _ in asked] == asked
