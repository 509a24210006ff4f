"""``tlt doctor``: the GPUs, their driver, and whether torch can use them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_tlt.platform.doctor import Check, Needs

_QUERY = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
)
# CUDA major release -> oldest compatible driver (NVIDIA, CUDA compatibility, minor version compatibility table).
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_USED_MIB = 2048


@dataclass(frozen=True)
class Gpu:
    """One row of nvidia-smi; sizes in MiB; ``errors`` is None without ECC."""

    index: int
    uuid: str
    name: str
    driver: str
    total: int
    used: int
    errors: int | None


def read_gpus() -> list[Gpu] | None:
    """All GPUs that the driver reports, those of other jobs too; None without a driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return parse_gpus(done.stdout) if done.returncode == 0 else None


def parse_gpus(text: str) -> list[Gpu]:
    """Parses ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``; ``[N/A]`` marks absent values."""
    gpus = []
    for line in text.splitlines():
        index, uuid, name, driver, total, used, errors = (part.strip() for part in line.split(","))
        sizes = _number(total) or 0, _number(used) or 0
        gpus.append(Gpu(int(index), uuid, name, driver, *sizes, _number(errors)))
    return gpus


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def check_devices(needs: Needs) -> Iterator[Check]:
    """Compares the GPUs with the config; without GPUs, checks whether the config runs on CPU."""
    import torch

    gpus = read_gpus()
    if not torch.cuda.is_available():
        yield _without_torch(needs, gpus, torch.version.cuda)
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    found = f"{count} x {', '.join(names)}, torch for CUDA {torch.version.cuda}"
    if count < needs.processes:
        advice = "sbatch --gpus-per-node, a smaller launcher.nproc_per_node, or exclude this node"
        yield Check("devices", "fail", f"{found}; launcher.nproc_per_node is {needs.processes}", advice)
    elif len(names) > 1:
        advice = "select equal GPUs with CUDA_VISIBLE_DEVICES: the slowest one limits the others"
        yield Check("devices", "warn", found, advice)
    else:
        yield Check("devices", "ok", found)
    visible = {str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-") for index in range(count)}
    yield from check_gpus(gpus or [], torch.version.cuda, visible)
    for index in range(min(count, max(1, needs.processes))):
        yield from _computes(torch, index)


def _without_torch(needs: Needs, gpus: list[Gpu] | None, cuda: str | None) -> Check:
    if gpus:
        found = f"{len(gpus)} x {gpus[0].name} with driver {gpus[0].driver}, and torch sees none: it is built for"
        if cuda is None:
            return Check("devices", "fail", f"{found} CPU", "remove .venv and set it up with TLT_STACK=gpu")
        oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]), "a newer one")
        return Check("devices", "fail", f"{found} CUDA {cuda}", f"driver {oldest} or newer on this node")
    if needs.needs_gpu:
        advice = "a node with GPUs (sbatch --gpus-per-node; nvidia-smi shows none), or actor.transformer_impl: local"
        return Check("devices", "fail", "no GPU, and this config's layers need one", advice)
    return Check("devices", "ok", "no GPU: CPU and gloo")


def visible_count() -> int:
    """Number of GPUs that a run would use here: those that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_gpus(gpus: list[Gpu], cuda: str | None, visible: Collection[str]) -> Iterator[Check]:
    """Checks the driver's version; of the ``visible`` GPUs (torch's UUIDs) memory that is in use and memory errors.

    CUDA_VISIBLE_DEVICES counts in CUDA's order, nvidia-smi in the bus's, so UUIDs tell which GPUs these are. That of a
    part of a GPU (MIG) is no GPU's.
    """
    drivers = sorted({gpu.driver for gpu in gpus})
    oldest = _OLDEST_DRIVER.get(int((cuda or "0").split(".")[0]))
    for driver in drivers:
        if oldest and _parts(driver) < _parts(oldest):
            yield Check("driver", "fail", f"{driver}; CUDA {cuda} needs {oldest}", "update the driver on this node")
        else:
            yield Check("driver", "ok", driver)
    for gpu in gpus:
        if gpu.uuid.removeprefix("GPU-") not in visible:
            continue
        if gpu.used > _USED_MIB:
            advice = "nvidia-smi lists the processes: possibly left by an earlier job"
            yield Check("GPU memory", "fail", f"GPU {gpu.index}: {gpu.used} of {gpu.total} MiB are in use", advice)
        if gpu.errors:
            found = f"GPU {gpu.index}: {gpu.errors} uncorrected memory errors"
            yield Check("GPU memory", "fail", found, "exclude this node and have it reset: nvidia-smi -q -d ECC")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _computes(torch: Any, index: int) -> Iterator[Check]:
    """Multiplies matrices of ones, whose product is known."""
    size = 1024
    try:
        ones = torch.ones(size, size, device=f"cuda:{index}", dtype=torch.bfloat16)
        wrong = int((ones @ ones != size).sum())
    except RuntimeError as error:
        yield Check("devices", "fail", f"GPU {index}: {str(error).splitlines()[0]}", "reset it, or exclude this node")
        return
    if wrong:
        advice = "exclude this node: the GPU is broken"
        yield Check("devices", "fail", f"GPU {index}: {wrong} wrong entries in a product of {size} x {size}", advice)
