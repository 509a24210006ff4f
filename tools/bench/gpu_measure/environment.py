"""What a measurement ran on: versions, device, driver, clocks, memory and date."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_tlt.platform.versions import installed_version

_LIBRARIES = ("numpy", "numba", "llvmlite", "triton", "flashinfer-python", "safetensors")
_QUERIED = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)
_DESCRIBE = """
import json
from megatron_tlt.observe.environment import describe_environment
print(json.dumps(describe_environment()))
"""


def repository_root() -> Path:
    """The folder that holds ``tools`` and ``megatron_tlt``."""
    return Path(__file__).resolve().parents[3]


def describe(*, commit: str | None = None) -> dict[str, Any]:
    """``describe_environment``, other libraries' versions, ``nvidia_smi``, ``commit`` and ``date`` (UTC).

    ``commit`` is what to record in a copy without git, which cannot tell.

    Another process asks torch, so that this one holds no memory of the device while measurements run.
    """
    found = subprocess.run(
        [sys.executable, "-c", _DESCRIBE], cwd=repository_root(), capture_output=True, text=True, check=True
    )
    return {
        **json.loads(found.stdout.splitlines()[-1]),
        **{name: installed_version((name,)) for name in _LIBRARIES},
        "nvidia_smi": gpu_state(),
        "commit": _commit() or commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def gpu_state() -> dict[str, str] | None:
    """The first GPU's state as nvidia-smi prints it, with units; None without nvidia-smi or a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader", "--id=0"]
    found = subprocess.run(command, capture_output=True, text=True)
    return parse_gpu_state(found.stdout) if found.returncode == 0 else None


def parse_gpu_state(line: str) -> dict[str, str] | None:
    """A line of nvidia-smi's CSV by field; None where it has another number of fields."""
    values = [value.strip() for value in line.strip().split(",")]
    return dict(zip(_QUERIED, values, strict=True)) if len(values) == len(_QUERIED) else None


def _commit() -> str | None:
    """The commit, with ``+`` where tracked files differ; None in a copy without git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=repository_root(),
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
