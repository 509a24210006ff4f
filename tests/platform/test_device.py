"""The process group: what a failed rendezvous says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_tlt.errors import RunError
from megatron_tlt.platform import device as devices
from megatron_tlt.platform.device import Device, initialize_distributed, prepare
from megatron_tlt.trainer import synchronization
from megatron_tlt.trainer.synchronization import wake

JOIN = "from megatron_tlt.platform.device import initialize_distributed; initialize_distributed(5)"


def test_a_port_in_use_is_one_line_with_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, "-c", JOIN], env={**os.environ, **launch}, capture_output=True, text=True, timeout=120
        )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("megatron_tlt.errors.RunError: rendezvous at 127.0.0.1:" + port), done.stderr
    assert "in use" in last


def test_only_nccls_collectives_may_take_as_long_as_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library: Any = dist.distributed_c10d
    asked: list[Any] = []
    for name in ("_timeout_s", "_device_timeout_s"):
        monkeypatch.setattr(devices, name, 0)
    monkeypatch.setattr(devices, "current_device", lambda: Device(torch.device("cuda", 0), "nccl"))
    monkeypatch.setattr(devices, "start_pulse", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: asked.append((backend, timeout)))
    for name in ("get_rank", "get_world_size"):
        monkeypatch.setattr(dist, name, lambda: 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # another test may have joined a group
    monkeypatch.setattr(library, "_get_default_store", lambda: None)
    monkeypatch.setattr(library, "_set_pg_timeout", asked.append)
    monkeypatch.setattr(library, "default_pg_nccl_timeout", None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "")  # so that the test's end restores it
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    initialize_distributed(60, 900, tmp_path / "logs")
    assert asked == [("nccl", timedelta(seconds=60)), timedelta(seconds=900)], "the rendezvous does not take as long"
    assert library._get_default_timeout("nccl") == timedelta(seconds=900), "of vLLM's groups"
    assert (devices.collective_timeout_s(), devices.device_timeout_s()) == (60, 900)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/logs/torch-collectives-rank"


@dataclass
class Gpu:
    """What torch says of a GPU of 80 bytes, of which an engine that sleeps has given 50 back."""

    used: int = 10
    reserved: int = 55
    peak: int = 55
    slept: int = 50

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 - self.used, 80))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.reserved))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        return Device(torch.device("cuda", 0), "nccl")

    def take(self, nbytes: int) -> None:
        self.used += nbytes
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)


def test_memory_of_an_engine_that_sleeps_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    device = gpu.install(monkeypatch)
    assert device.memory_bytes() == 10 and device.peak_memory_bytes() == 10
    gpu.take(30)
    gpu.take(-25)
    assert device.memory_bytes() == 15
    assert device.peak_memory_bytes() == 40, "what came and went since the last call"
    assert device.peak_memory_bytes() == 15


def test_what_torch_gave_back_before_an_engine_woke_does_not_add_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    device = gpu.install(monkeypatch)
    monkeypatch.setattr(synchronization, "current_device", lambda: device)

    class Engine:
        def wake_up(self, parts: list[str]) -> None:
            gpu.used += {"weights": 10, "kv_cache": 45}[parts[0]]  # outside torch's statistics

    engine: Any = Engine()
    device.peak_memory_bytes()
    gpu.take(30)
    wake(engine, "weights")
    gpu.take(10)
    gpu.take(-40)  # the actor is offloaded
    wake(engine, "kv_cache")
    assert (gpu.used, device.peak_memory_bytes()) == (65, 65), "of 80, not 65 and the actor's 40"
    wake(engine, "weights")
    gpu.take(3)
    gpu.take(-3)
    assert device.peak_memory_bytes() == 78, "from the last call on"


def test_a_bound_holds_beside_a_sleeping_engine_and_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    device = gpu.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", None)  # torch's own limit stays in force
    with device.memory_bound(20) as check:
        gpu.take(20)
        check()
        gpu.take(1)
        with pytest.raises(RunError, match=r"device memory: .* taken; allowed: "):
            check()
    gpu.take(40)
    with device.memory_bound(None) as check:
        check()


def test_kernels_start_in_order_where_megatron_overlaps_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    prepare(1)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    prepare(2)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    prepare(2)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_deterministic_kernels_are_those_of_all_libraries(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    names = ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO")
    for name in names:
        monkeypatch.setenv(name, "")  # so that the test's end removes it
        monkeypatch.delenv(name)
    prepare()
    assert not torch.are_deterministic_algorithms_enabled() and not set(names) & os.environ.keys()
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    prepare(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert [os.environ[name] for name in names] == [":4096:8", "0", "Ring"]


def test_the_peak_of_a_processor_is_that_since_the_last_call() -> None:
    device = Device(torch.device("cpu"), "gloo")
    device.peak_memory_bytes()
    before = device.peak_memory_bytes()
    held = torch.ones(100 << 20, dtype=torch.uint8)
    del held
    during, after = device.peak_memory_bytes(), device.peak_memory_bytes()
    assert during - before > 60 << 20 and during - after > 60 << 20
