"""What the processes of a launch find in their environment, and what is left of those that are given up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_tlt.errors import RunError
from megatron_tlt.platform import processes
from megatron_tlt.platform.processes import launch_environment, run_processes

PRODUCTS = """
import torch

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

weight = torch.zeros(1536, 576, dtype=torch.bfloat16, requires_grad=True)
before = 0.0
for rows in range(160, 480):
    input = torch.zeros(rows, 576, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(input, weight).sum().backward()
    if rows == 200:
        before = resident_mib()
print(resident_mib() - before)
"""


def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    grown = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=launch_environment(1), capture_output=True, text=True, check=True
    )
    assert float(grown.stdout) < 40


def test_processes_that_are_given_up_leave_what_they_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import time\nfor i in range(30): print(f'step {i}', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(processes, "torchrun_command", lambda *_: [sys.executable, "-c", said])
    with pytest.raises(RunError, match=r"(?s)^slow: still running after 3 s; last output:\nstep 10\n.*step 29$"):
        run_processes("slow", "a.module", [], 1, 3.0)
