"""What the processes of a launch find in their environment."""

from __future__ import annotations

import subprocess
import sys

from megatron_tlt.platform.processes import launch_environment

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
