"""A phase that takes too long ends the run and says which rank it waits for."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.phases import PHASES
from megatron_tlt.errors import RanksLost
from megatron_tlt.platform import lost_ranks, phase_watch
from megatron_tlt.platform.phase_watch import PhaseWatch
from tests.config.test_loader import violations, write


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
