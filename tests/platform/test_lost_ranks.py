"""Ranks on three "nodes" of this machine: who is missing is said by all that are left, whatever they wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_tlt.errors import RunError
from megatron_tlt.platform.lost_ranks import _EVERY_S, _SILENT_S, _SilenceCounter, is_broken_line
from tests.helpers.launch import REPOSITORY, free_port, slowness

WORKER = Path(__file__).parent / "workers" / "lost_ranks.py"
WORLD, STOPPED = 3, 2


def test_only_errors_about_lines_between_ranks_are_taken_for_such() -> None:
    assert is_broken_line(RuntimeError("[unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation"))
    assert is_broken_line(dist.DistBackendError("NCCL error"))
    caused = RunError("a transfer with rank 1 broke off")
    caused.__cause__ = RuntimeError("Connection closed by peer [10.0.0.2]:4000")
    assert is_broken_line(caused)
    assert not is_broken_line(RunError("disk full")) and not is_broken_line(RuntimeError("shape mismatch"))
    assert not is_broken_line(ValueError("connection closed"))


class CountingStore:
    """The counters of a store, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {"where/1": 1, "pulse/1": 0}

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_silence_is_counted_in_own_looks_and_an_ended_rank_is_not_lost() -> None:
    store: Any = CountingStore()
    silence, needed = _SilenceCounter(), int(_SILENT_S / _EVERY_S)
    assert not any(silence.is_lost(store, 1) for _ in range(needed))
    assert silence.is_lost(store, 1)
    store.add("pulse/1", 1)
    assert not any(silence.is_lost(store, 1) for _ in range(needed)), "it goes on: counted from the start"
    store.add("ended/1", 1)
    assert not any(silence.is_lost(store, 1) for _ in range(3 * needed))


@pytest.mark.parametrize(
    "waits_in",
    [pytest.param("collective", marks=pytest.mark.representative("lost rank")), "nothing that could fail"],
)
@pytest.mark.distributed
def test_a_rank_that_stands_still_is_named_by_all_others(tmp_path: Path, waits_in: str) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORLD),
        "GROUP_WORLD_SIZE": str(WORLD),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), waits_in],
            env={**environment, "RANK": str(rank), "GROUP_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        end = time.monotonic() + 60 * slowness()
        while len(list(tmp_path.glob("ready*"))) < WORLD:
            assert time.monotonic() < end
            time.sleep(0.05)
        ranks[STOPPED].send_signal(signal.SIGSTOP)
        for rank in (0, 1):
            said = ranks[rank].communicate(timeout=60 * slowness())[1]
            last = said.splitlines()[-1]
            assert last.startswith(f"error: rank {rank} (node {rank}, "), said[-3000:]
            assert f"lost its connection to rank {STOPPED} (node {STOPPED}, " in last
            assert ranks[rank].returncode == 1
    finally:
        for process in ranks:
            process.kill()
            process.wait()
