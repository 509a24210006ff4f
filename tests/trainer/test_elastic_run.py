"""Two nodes, of which one is lost and returns, or is slow: the run goes on with the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.launch import free_port, slowness, worker_of
from tests.trainer.conftest import Runs
from tests.trainer.test_run import rows, wait_for_rows

pytestmark = [pytest.mark.distributed, pytest.mark.slow(60), pytest.mark.timeout(900)]

STEPS = 40
ELASTIC = (
    "launcher.nnodes=2",
    "launcher.nproc_per_node=1",
    "launcher.collective_timeout_s=60",
    "elastic.min_devices=1",
    "elastic.reconfigure_s=0",
    "trainer.save_every=0",
    f"trainer.steps={STEPS}",
)


def only_worker_of(mark: str) -> int:
    """The process of a launcher's only rank, whose number torchrun chooses."""
    for rank in range(2):
        with contextlib.suppress(LookupError):
            return worker_of(mark, rank)
    raise LookupError(f"no rank of {mark}")


def slow_down(process: int, ends: threading.Event) -> None:
    """Lets a process run for a sixth of the time, until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        while not ends.is_set():
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(process, signal.SIGCONT)
            time.sleep(0.02)


def test_a_slow_node_is_left_out_until_the_launch_ends(runs: Runs, tmp_path: Path) -> None:
    run, steps = runs.folder / "slow-node", 14
    given = {"TLT_RENDEZVOUS": f"127.0.0.1:{free_port()}", "TLT_JOB": "slow"}
    settings = (*ELASTIC, f"run.dir={run}", f"elastic.memory_dir={tmp_path}", f"trainer.steps={steps}")
    settings += ("guard={straggler_factor: 3.0, straggler_steps: 2, on_straggler: leave_out}",)
    nodes = [
        runs.start(f"slow-node-{index}", *settings, env={**given, "TLT_NODE_RANK": str(index)}) for index in range(2)
    ]
    wait_for_rows(runs, "slow-node", 2, nodes[0])
    ends = threading.Event()
    slows = threading.Thread(target=slow_down, args=(only_worker_of(runs.started["slow-node-1"]), ends))
    slows.start()
    try:
        statuses = [process.wait(600 * slowness()) for process in nodes]
    finally:
        ends.set()
        slows.join()
    said = [runs.log(f"slow-node-{index}") for index in range(2)]
    assert statuses == [0, 0], said
    found = rows(run)
    assert [row["step"] for row in found] == list(range(steps + 1)), "every step once"
    sizes = [row["elastic/devices"] for row in found[1:]]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {1.0, 2.0}, sizes
    assert "node 1 is left out, because it is slow, after step" in said[0]
    assert "the run goes on with 1 of 2 devices (node 0)" in said[0]


def test_a_lost_node_costs_no_step_and_returns_between_two(runs: Runs, tmp_path: Path) -> None:
    run = runs.folder / "elastic"
    given = {"TLT_RENDEZVOUS": f"127.0.0.1:{free_port()}", "TLT_JOB": "elastic"}
    settings = (*ELASTIC, f"run.dir={run}", f"elastic.memory_dir={tmp_path}")

    def start(index: int):
        return runs.start(f"elastic-node{index}", *settings, env={**given, "TLT_NODE_RANK": str(index)})

    nodes = [start(0), start(1)]
    wait_for_rows(runs, "elastic", 3, nodes[0])
    runs.kill("elastic-node1")  # launcher and rank at once, as a power cut does
    deadline = time.monotonic() + 200 * slowness()
    while not (run / "logs" / "members" / "elastic" / "round-00001" / "published").exists():
        assert time.monotonic() < deadline and nodes[0].poll() is None, runs.log("elastic-node0")
        time.sleep(0.1)
    nodes[1] = start(1)  # node 0 goes on without it for as long as it takes to start
    statuses = [process.wait(600 * slowness()) for process in nodes]
    said = [runs.log(f"elastic-node{index}") for index in range(2)]
    assert statuses == [0, 0], said
    found = rows(run)
    assert [row["step"] for row in found] == list(range(STEPS + 1)), "every step once"
    sizes = [row["elastic/devices"] for row in found[1:]]
    changes = [sizes[0], *(now for before, now in itertools.pairwise(sizes) if now != before)]
    assert changes == [2.0, 1.0, 2.0], sizes
    assert "the run goes on with 1 of 2 devices (node 0)" in said[0]
    assert "node 1 joins after step" in said[0] and "the run goes on with 2 of 2 devices (nodes 0, 1)" in said[0]
    assert list(tmp_path.iterdir()) == []
