"""One run through all that can happen to its spot trainer on one node: at its end the policy is bit for bit right."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq

from megatron_tlt.drafter.checkpoint import KIND
from megatron_tlt.observe.timeline import read_trace
from megatron_tlt.spot import newest
from megatron_tlt.spot.fault_hooks import VARIABLE
from tests.conftest import mounted
from tests.helpers.launch import slowness, worker_of
from tests.helpers.spot_messages import SpotMessages
from tests.helpers.traces import trace_problems
from tests.trainer.conftest import FAULT_STEPS, GREEDY_SPOT, Runs, assert_same_policy, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SILENT_S = 1.5
HELD_S = 3.0
UNSIGNED, FORGED, REPLAYED = 1, 3, 5
# one checkpoint of this drafter, and not two
DISK = "900k"

Answer = TypeVar("Answer")


@dataclass
class Faulty:
    """The run, and what was seen of it from outside; RL steps are counted from 0, as in the messages."""

    runs: Runs
    process: subprocess.Popen[bytes]
    folder: Path
    messages: Path
    killed: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    """RL steps of: a member killed, the leader killed, the coordinator held, messages forged."""
    reports_while_held: int = 0
    directives_while_held: int = 0

    def until(self, question: Callable[[], Answer], what: str) -> Answer:
        """The first answer that is neither false nor None."""
        end = time.monotonic() + 240 * slowness()
        while not (answer := question()):
            assert self.process.poll() is None and time.monotonic() < end, f"{what}: {self.runs.log('faulty')}"
            time.sleep(0.002)
        return answer

    def port(self, launch: int) -> int:
        """The port of the coordinator of the run's ``launch``-th start, once it listens."""
        found: list[str] = []

        def listens() -> bool:
            log = self.folder / "logs" / "workers.log"
            text = log.read_text(errors="replace") if log.is_file() else ""
            found[:] = re.findall(r"the spot coordinator listens at tcp://127\.0\.0\.1:(\d+)", text)
            return len(found) > launch

        self.until(listens, f"no coordinator in launch {launch}")
        return int(found[launch])

    def pid(self, rank: int) -> int:
        return worker_of(self.runs.started["faulty"], rank)

    def in_session(self) -> SpotMessages:
        """Returns in the middle of a session that both waiting ranks train, in a later step than other faults."""
        sent = SpotMessages(self.messages)
        first = max(self.faults, default=0) + 1
        step = self.until(lambda: sent.session(2, first), f"no session from step {first} on")
        assert step is not None
        self.faults.append(step)
        return sent


@pytest.fixture(scope="module")
def faulty(runs: Runs) -> Iterator[Faulty]:
    folder = runs.folder / "faulty"
    (folder / "drafter").mkdir(parents=True)
    with mounted(folder / "drafter" / "spot", DISK):
        messages = runs.folder / "faulty-messages"
        messages.mkdir()
        process = runs.start("faulty", *GREEDY_SPOT, fresh=False, env={VARIABLE: str(messages)})
        run = Faulty(runs, process, folder, messages)
        try:
            kill_member(run)
            kill_leader(run)
            port = run.port(2)
            hold_coordinator(run)
            forge(run, port)
            assert run.process.wait(240 * slowness()) == 0, runs.log("faulty")
            yield run
        finally:
            runs.kill("faulty")
            run.process.wait()


def kill_member(run: Faulty) -> None:
    leader = run.in_session().leader()
    assert leader in (1, 2)
    run.killed.append(3 - leader)
    os.kill(run.pid(3 - leader), signal.SIGKILL)


def kill_leader(run: Faulty) -> None:
    run.port(1)
    leader = run.in_session().leader()
    assert leader in (1, 2)
    run.killed.append(leader)
    os.kill(run.pid(leader), signal.SIGKILL)


def hold_coordinator(run: Faulty) -> None:
    sent = run.in_session()
    with sent.coordinator_held():
        time.sleep(0.5)  # it ends its round
        reports, directives = len(sent.frames), len(sent.directives)
        time.sleep(HELD_S)
        run.reports_while_held = sum(report.rank == 0 for report, _ in sent.frames[reports:])
        run.directives_while_held = len(sent.directives) - directives


def forge(run: Faulty, port: int) -> None:
    """In a session somebody says that the first rank is done: all would be over."""
    report, frames = next(item for item in reversed(run.in_session().frames) if item[0].rank == 0)
    lie = replace(report, sequence=report.sequence + 10**6, released=True, available=True)
    payload = msgspec.msgpack.encode(lie)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(UNSIGNED):
            stranger.send(payload)
        for _ in range(FORGED):
            stranger.send_multipart([frames[0], payload])  # signed, but not this
        for _ in range(REPLAYED):
            stranger.send_multipart(frames)
        time.sleep(0.3)


def test_whatever_happens_the_policy_is_that_of_a_run_without_drafter(faulty: Faulty, undisturbed: Path) -> None:
    assert_same_policy(faulty.folder, undisturbed)


def test_a_killed_rank_and_a_killed_leader_start_the_run_again_from_its_checkpoint(faulty: Faulty) -> None:
    said = [line for line in faulty.runs.log("faulty").splitlines() if "was killed by" in line]
    assert said == [
        f"warning: rank {rank} was killed by SIGKILL in step {step + 1}; all ranks restart from "
        f"the checkpoint of step {step} (restart {restart} of 3)"
        for restart, (rank, step) in enumerate(zip(faulty.killed, faulty.faults, strict=False), start=1)
    ]
    summary = json.loads((faulty.folder / "summary.json").read_text())
    assert summary["steps"] == FAULT_STEPS
    trace = read_trace(faulty.folder / "timeline.json")
    assert trace_problems(trace) == []
    done = [e["args"]["step"] for e in trace["traceEvents"] if e["name"] == "update" and e["pid"] == 0]
    assert done == list(range(1, FAULT_STEPS + 1))


def test_the_drafter_goes_on_too(faulty: Faulty) -> None:
    versions = [row["drafter/version"] for row in rows_of(faulty.folder)]
    assert versions == sorted(set(versions))
    trained = {row["step"] for row in rows_of(faulty.folder) if row["spot/steps"]}
    _, _, held_in, forged_in = faulty.faults
    assert {held_in + 1, forged_in + 1} <= trained, "a fault ended drafter training for good"
    assert all(row["drafter/failed"] == 0 for row in rows_of(faulty.folder)), faulty.runs.log("faulty")


def test_a_coordinator_that_is_held_up_holds_up_nobody(faulty: Faulty) -> None:
    # heartbeats of its own process went on: that thread stood still, and nothing else
    assert faulty.directives_while_held == 0
    assert faulty.reports_while_held >= HELD_S / 0.2 / 2
    step = faulty.faults[2] + 1
    trace = read_trace(faulty.folder / "timeline.json")
    events = [e for e in trace["traceEvents"] if e.get("args", {}).get("step") == step]
    decoded = max(e["ts"] + e["dur"] for e in events if e["name"] == "rollout")
    waited = max(e["ts"] + e["dur"] for e in events if e["name"] == "idle")
    assert (waited - decoded) / 1e6 < SILENT_S + 1.0


def test_a_full_disk_costs_checkpoints_of_the_drafter_and_nothing_else(faulty: Faulty) -> None:
    last = rows_of(faulty.folder)[-1]
    assert last["spot/failed_checkpoints"] > 0
    assert "failed" in (faulty.folder / "logs" / "workers.log").read_text(errors="replace")
    found = newest(faulty.folder / "drafter" / "spot", KIND)
    assert found is not None and found.payload.header["version"] <= last["drafter/version"]


def test_forged_and_repeated_messages_are_dropped_and_counted(faulty: Faulty) -> None:
    counted = [row["spot/refused_messages"] for row in rows_of(faulty.folder)]
    dropped, before = float(UNSIGNED + FORGED + REPLAYED), faulty.faults[3]
    assert counted == [0.0] * before + [dropped] * (FAULT_STEPS - before)
