"""The environment of a measurement: versions and hardware, without names of machines, people or paths."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from megatron_tlt.platform.nodes import cgroup_bytes
from megatron_tlt.platform.versions import REQUIREMENTS, installed_version

# Summary key -> distributions that may provide it; the first installed one counts.
_DISTRIBUTIONS = {
    **{requirement.name.replace("-", "_"): requirement.distributions for requirement in REQUIREMENTS},
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "reasoning_gym": ("reasoning-gym",),
    "math_verify": ("math-verify",),
    "megatron_tlt": ("megatron_tlt", "megatron-tlt"),
}


def describe_environment() -> dict[str, Any]:
    """Versions (None where not installed), processor, usable cores, memory in GiB, and the devices' names."""
    return {
        "python": platform.python_version(),
        **{name: installed_version(candidates) for name, candidates in _DISTRIBUTIONS.items()},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_gib": round(min(psutil.virtual_memory().total, cgroup_bytes("memory.max") or math.inf) / 2**30, 1),
        **_devices(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores available to this process: its affinity, and a container's quota if there is one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            allowed = min(allowed, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return allowed


def _devices() -> dict[str, Any]:
    """``device`` (cpu or cuda), and on CUDA the devices' names, their number, and CUDA's version."""
    try:
        import torch
    except ImportError:
        return {"device": "cpu", "gpus": 0}
    if not torch.cuda.is_available():
        return {"device": "cpu", "gpus": 0}
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    return {
        "device": "cuda",
        "gpus": torch.cuda.device_count(),
        "gpu_names": names,
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
