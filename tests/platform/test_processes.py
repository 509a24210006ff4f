"""What the processes of a launch find in their environment, and what is left of those that are given up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform import processes
from megatron_tlt.platform.processes import launch_environment, numa_binding, run_processes

PRODUCTS = """
import torch

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

weight = torch.zeros(1536, 576, dtype=torch.bfloat16, requires_grad=True)
before = 0.0
for rows in range(160, 280):
    input = torch.zeros(rows, 576, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(input, weight).sum().backward()
    if rows == 190:
        before = resident_mib()
print(resident_mib() - before)
"""


def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    grown = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=launch_environment(1), capture_output=True, text=True, check=True
    )
    assert float(grown.stdout) < 40


def test_processes_that_are_given_up_leave_what_they_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "import time\nfor i in range(30): print(f'step {i}', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(processes, "torchrun_command", lambda *_: [sys.executable, "-c", said])
    with pytest.raises(RunError, match=r"(?s)^slow: still running after 3 s; last output:\nstep 10\n.*step 29$"):
        run_processes("slow", "a.module", [], 1, 3.0)
    assert capsys.readouterr().err.startswith("slow: step 0\nslow: step 1\n")  # into a file too


def test_processes_are_bound_to_processors_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLT_NUMA", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert numa_binding() == []
    monkeypatch.setenv("TLT_NUMA", "socket")
    assert numa_binding() == ["--numa-binding=socket"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="TLT_NUMA: found 'socket', which needs the program numactl"):
        numa_binding()
    monkeypatch.setenv("TLT_NUMA", "gpu")
    with pytest.raises(ConfigError, match="TLT_NUMA: found 'gpu'; allowed: none, node, "):
        numa_binding()


def test_compile_caches_are_on_the_nodes_own_disk_in_a_folder_that_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    environment = launch_environment(1)
    assert environment["TRITON_CACHE_DIR"] == "/elsewhere"
    (folder,) = tmp_path.iterdir()
    assert environment["VLLM_CACHE_ROOT"] == str(folder / "vllm") and folder.stat().st_mode & 0o077 == 0
    assert launch_environment(1)["VLLM_CACHE_ROOT"] == environment["VLLM_CACHE_ROOT"]
    folder.chmod(0o777)  # as if somebody else had made it
    assert launch_environment(1)["VLLM_CACHE_ROOT"] != environment["VLLM_CACHE_ROOT"]
