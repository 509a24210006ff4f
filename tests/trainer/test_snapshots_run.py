"""A run without checkpoints whose ranks are killed goes on from memory, and ends with the bits of one that was not.

Its ranks are forks of a process that has imported their libraries; those of the other one start from nothing.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.launch import slowness, worker_of
from tests.trainer.conftest import Runs
from tests.trainer.test_run import assert_same_samples, rows, wait_for_rows, weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_it_goes_on_from_memory_and_leaves_nothing_there(runs: Runs, uninterrupted: Path, tmp_path: Path) -> None:
    elastic = (f"elastic.memory_dir={tmp_path}", "trainer.save_every=0", "launcher.preload=true")
    process = runs.start("snapshots", *elastic)
    for victim, after in ((1, 2), (0, 3)):
        wait_for_rows(runs, "snapshots", after, process)
        os.kill(worker_of(runs.started["snapshots"], victim), signal.SIGKILL)
    assert process.wait(600 * slowness()) == 0, runs.log("snapshots")
    run, log = runs.folder / "snapshots", runs.log("snapshots")
    workers = (run / "logs" / "workers.log").read_text()
    resumed = [int(step) for step in re.findall(r"resumed from the snapshot of step (\d+) in memory", workers)]
    # a step is recorded shortly before its snapshot is published
    assert len(resumed) == 2 and resumed[0] >= 1 and resumed[1] >= 2, workers
    assert "restart from the newest snapshot in memory, else step 0" in log
    assert weights(run) == weights(uninterrupted)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    assert all(row["time/snapshot"] > 0 for row in rows(run)[1:])
    assert_same_samples(run, uninterrupted)
    assert list(tmp_path.iterdir()) == []
