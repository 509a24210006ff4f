"""A phase that takes too long ends the run and says which rank it waits for."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.phases import PHASES
from megatron_tlt.config.schema import LauncherConfig
from megatron_tlt.errors import RanksLost
from megatron_tlt.platform import lost_ranks, phase_watch
from megatron_tlt.platform.flight_record import lacks_records, waits_in
from megatron_tlt.platform.phase_watch import PhaseWatch
from tests.config.test_loader import violations, write
from tests.helpers.launch import run_torchrun

HANGING = Path(__file__).parent / "workers" / "hanging.py"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[RanksLost]:
    """The errors that would have ended the process."""
    monkeypatch.setattr(phase_watch, "_EVERY_S", 0.05)
    monkeypatch.setattr(phase_watch, "_LISTEN_S", 0.5)
    found: list[RanksLost] = []
    monkeypatch.setattr(lost_ranks, "end_once", lambda error, end: found.append(error))
    return found


def wait_for(found: list[RanksLost], limit_s: float = 20.0) -> str:
    end = time.monotonic() + limit_s
    while not found:
        assert time.monotonic() < end
        time.sleep(0.02)
    return str(found[0])


def test_a_rank_that_stands_still_is_named_with_its_phase(tmp_path: Path, ended: list[RanksLost]) -> None:
    store = dist.HashStore()
    watch = PhaseWatch({"update": 0.5, "rollout": math.inf}, store, 0, 3, tmp_path / "logs")
    living = PhaseWatch({"update": 99.0}, store, 1, 3, tmp_path / "logs")
    store.set("phase/2", "log-probs")  # rank 2 stands still
    watch.begin("rollout")
    living.begin("update")
    time.sleep(1.0)
    assert not ended, "a phase without a limit may take any time"
    watch.begin("update")
    said = wait_for(ended)
    living.close()
    assert "rank 0 (" in said and "in phase 'update' for longer than launcher.phase_timeouts_s allows, 0.5 s" in said
    assert "standing still: rank 2 in 'log-probs';" in said
    stacks = (tmp_path / "logs" / "stacks-rank00000.txt").read_text()
    assert f"stacks: {tmp_path}" in said and "wait_for" in stacks, "the main thread's stack"


def test_ranks_that_wait_for_the_same_one_do_not_name_each_other(tmp_path: Path, ended: list[RanksLost]) -> None:
    store = dist.HashStore()
    store.set("phase/2", "update")
    for rank in (0, 1):
        PhaseWatch({"update": 0.3}, store, rank, 3, tmp_path).begin("update")
    wait_for(ended)
    time.sleep(0.5)
    assert len(ended) == 2 and all("standing still: rank 2 in 'update';" in str(error) for error in ended), ended


def test_without_a_silent_rank_all_phases_are_said(tmp_path: Path, ended: list[RanksLost]) -> None:
    store = dist.HashStore()
    living = PhaseWatch({"update": 99.0}, store, 1, 2, tmp_path)
    living.begin("update")
    time.sleep(0.3)
    watch = PhaseWatch({"update": 0.2}, store, 0, 2, tmp_path)
    watch.begin("update")
    assert "all others answer: rank 1 in 'update';" in wait_for(ended)
    living.close()


def test_phases_that_end_in_time_end_nothing(tmp_path: Path, ended: list[RanksLost]) -> None:
    watch = PhaseWatch({"update": 0.5, "rollout": 0.5}, dist.HashStore(), 0, 1, tmp_path)
    for phase in ("rollout", "update") * 4:
        watch.begin(phase)
        time.sleep(0.2)
    watch.pause()
    time.sleep(0.8)
    watch.close()
    time.sleep(0.8)
    assert not ended and not PhaseWatch({"update": math.inf}, dist.HashStore(), 0, 1, tmp_path)._thread.is_alive()
    assert threading.active_count() < 20


def test_a_phase_that_no_limit_could_be_set_for_does_not_begin(tmp_path: Path) -> None:
    watch = PhaseWatch(dict.fromkeys(PHASES, 99.0), dist.HashStore(), 0, 1, tmp_path)
    for phase in PHASES:
        watch.begin(phase)
    with pytest.raises(ValueError, match=r"phase 'saving': found no limit; allowed: start, .* snapshot, export"):
        watch.begin("saving")
    watch.close()


def test_limits_are_set_by_phase(tmp_path: Path) -> None:
    overrides = ["launcher.phase_timeout_s=100", "launcher.phase_timeouts_s={rollout: 7200}"]
    limits = load_config(write(tmp_path), overrides, check_libraries=False).launcher.phase_limits_s
    assert limits["rollout"] == 7200 and limits["update"] == limits["start"] == 100
    none = ["launcher.phase_timeout_s=null", "launcher.phase_timeouts_s={update: 5}"]
    assert load_config(write(tmp_path), none, check_libraries=False).launcher.phase_limits_s == {
        **dict.fromkeys(PHASES, math.inf),
        "update": 5.0,
    }
    (line,) = violations(write(tmp_path), "launcher.phase_timeouts_s={decode: 5}")
    assert "launcher.phase_timeouts_s.decode" in line and "rollout" in line


def test_the_limit_of_nccls_collectives_comes_after_those_of_all_phases() -> None:
    """torch's watchdog ends a process without a name, so it must not be the first."""
    assert LauncherConfig().timeouts_s == (600, 4 * 3600 + 600)
    mixed = LauncherConfig(phase_timeout_s=None, phase_timeouts_s={"update": 900}, collective_timeout_s=30)
    assert mixed.timeouts_s == (30, 1500)
    assert LauncherConfig(phase_timeout_s=None, collective_timeout_s=30).timeouts_s == (30, 30), "the only limit left"


def entry(group: int, operation: str, created_s: int, state: str = "scheduled", **more: object) -> dict[str, object]:
    """A row of torch's flight record."""
    return {
        "pg_id": group,
        "process_group": [f"g{group}", ["default_pg", "DATA", "undefined"][group]],
        "profiling_name": f"nccl:{operation}",
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "collective_seq_id": created_s,
        "p2p_seq_id": 0,
        "time_created_ns": created_s * 10**9,
        **more,
    }


def test_the_collective_that_is_waited_for_is_the_first_that_has_not_finished() -> None:
    part = {"is_p2p": True, "p2p_seq_id": 7}
    entries = [
        entry(1, "send", 1, **part),  # torch marks the batch alone
        entry(1, "recv", 1, **part),
        entry(1, "coalesced", 1, "completed"),
        entry(0, "all_reduce", 2, "completed"),
        entry(1, "all_gather", 3, "started"),
        entry(1, "all_reduce", 4),
        entry(0, "barrier", 5),
    ]
    record = {"entries": entries, "pg_config": {"g1": {"name": "g1", "ranks": "[0, 2]"}}}
    now = time.time_ns() // 10**9
    said = waits_in({"nccl": record, "gloo": {"version": "2.10"}})
    assert said.startswith("nccl:all_gather number 3 of group DATA over ranks [0, 2] for ")
    assert abs(int(said.split()[-2]) - (now - 3)) < 60
    assert waits_in({"nccl": {"entries": entries[:4]}}) == ""
    sent = [*entries[:4], entry(0, "send", 6, **part)]
    assert waits_in({"nccl": {"entries": sent}}).startswith("nccl:send number 7 of group default_pg for ")


def test_a_torch_without_flight_records_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C import _distributed_c10d as library

    assert lacks_records() == ""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.delattr(library, name, raising=False)
    assert lacks_records() == "_dump_nccl_trace_json, _dump_fr_trace_json"


@pytest.mark.distributed
def test_the_collective_is_named_and_every_rank_that_answers_writes_its_record(tmp_path: Path) -> None:
    run_torchrun(HANGING, 2, [str(tmp_path)], timeout_s=90, env={"TORCH_FR_BUFFER_SIZE": "100"})
    said = (tmp_path / "error.txt").read_text()
    assert "in all_reduce of " in said and "waiting in gloo:all_reduce number 2 of group PAIR" in said
    assert "all others answer: rank 1 in 'update';" in said
    for rank in (0, 1):
        assert "hanging.py" in (tmp_path / f"stacks-rank0000{rank}.txt").read_text()
        records = json.loads((tmp_path / f"collectives-rank0000{rank}.json").read_text())
        assert records["gloo"]["entries"][0]["profiling_name"] == "gloo:all_reduce"


STUCK = """
import sys, time, torch.distributed as dist
from pathlib import Path
from megatron_tlt.platform import phase_watch
phase_watch._EVERY_S, phase_watch._RECORD_S = 0.1, 1
phase_watch.flight_records = lambda: time.sleep(600)
phase_watch.PhaseWatch({"update": 0.5}, dist.HashStore(), 0, 1, Path(sys.argv[1])).begin("update")
time.sleep(600)
"""


def test_a_record_that_hangs_as_well_does_not_keep_the_run(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STUCK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "in phase 'update' for longer than" in done.stderr, done.stderr
