"""A rank of a real run stands still: the run ends in time, with that rank's name."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.helpers.launch import kill_marked, slowness, worker_of
from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LIMIT_S = 12


def test_a_rank_that_stands_still_ends_the_run_with_its_name(runs: Runs) -> None:
    phases = ("rollout", "log-probs", "update", "reshard", "checkpoint")
    limits = ", ".join(f"{phase}: {int(LIMIT_S * slowness())}" for phase in phases)
    process = runs.start(
        "hang", f"launcher.phase_timeouts_s={{{limits}}}", "launcher.max_restarts=0", "trainer.steps=1000"
    )
    mark = runs.started["hang"]
    try:
        deadline = time.monotonic() + 200 * slowness()
        while not ((runs.folder / "hang" / "metrics.jsonl").exists() and rows_of(runs.folder / "hang")):
            assert time.monotonic() < deadline and process.poll() is None, runs.log("hang")
            time.sleep(0.05)
        os.kill(worker_of(mark, 1), signal.SIGSTOP)
        log = runs.folder / "hang" / "logs" / "workers.log"
        deadline = time.monotonic() + (LIMIT_S + 40) * slowness()
        while "error: rank 0 (" not in (said := log.read_text()):
            assert time.monotonic() < deadline, said[-5000:]
            time.sleep(0.1)
    finally:
        kill_marked(mark)  # torchrun would give the stopped rank 30 s more
        process.wait()
    assert "for longer than launcher.phase_timeouts_s allows" in said and "standing still: rank 1 in '" in said
    assert (runs.folder / "hang" / "logs" / "stacks-rank00000.txt").stat().st_size > 0
