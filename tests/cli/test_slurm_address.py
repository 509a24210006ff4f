"""The address at which a job's nodes meet, from what the resolver and Slurm say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
SLURM_JOB_ID=1
source slurm/common.sh
getent() {{ {getent}; }}
scontrol() {{ echo "NodeName=node1 NodeAddr={slurm} NodeHostName=node1"; }}
hostname() {{ echo "127.0.1.1 10.0.0.9 10.1.0.9"; }}
address_of node1
"""


@pytest.mark.parametrize(
    ("getent", "slurm", "expected"),
    [
        ('echo "10.0.0.7 STREAM node1"', "node1", "10.0.0.7"),
        ('printf "127.0.1.1 STREAM node1\\n10.0.0.7 STREAM\\n"', "node1", "10.0.0.7"),
        ('[[ "$2" == node1 ]] && echo 127.0.1.1 || echo "$2"', "10.0.0.8", "10.0.0.8"),
        ('echo "127.0.1.1 STREAM node1"', "node1", "10.0.0.9"),
        ("return 2", "node1", "10.0.0.9"),
        ("return 2", "127.0.0.1", "127.0.0.1"),
    ],
    ids=["by name", "second of the name", "by Slurm's address", "own", "unknown name", "all on one machine"],
)
def test_an_address_of_the_loopback_device_is_passed_over(getent: str, slurm: str, expected: str) -> None:
    script = SCRIPT.format(getent=getent, slurm=slurm)
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
