"""``tlt doctor``: types, and the checks of this node itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from megatron_tlt.platform.files import free_bytes
from megatron_tlt.platform.nodes import cgroup_bytes
from megatron_tlt.platform.versions import REQUIREMENTS, installed_versions, violations

Status = Literal["ok", "warn", "fail"]

_GIB = 2**30
# Resident memory of a process with torch, Megatron-Core and a CPU engine for a very small model: 1.7 to 2.5 GiB.
_CPU_PROCESS = (1.0, 2.5)
# A GPU process keeps the offloaded actor state and the checkpoint being saved in host memory.
_GPU_PROCESS = (4.0, 16.0)
_OPEN_FILES = (1024, 65536)
_TEMPORARY_GIB = 2.0
# NCCL and torch's loaders use shared memory; containers give 64 MiB by default.
_SHARED_MEMORY_GIB = (0.1, 1.0)
# Packages that break here, such as torchvision, are left out on purpose: absent is fine, a wrong release is not.
_HARDWARE_LINKS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Check:
    """One row of the table; ``advice`` says what to do, and is empty if nothing is needed."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Needs:
    """Requirements of a run for each node: its processes and their threads, and the run's folder.

    With several nodes all share the folder. ``checkpoint_bytes`` is the size of one checkpoint, if the model is known;
    ``checkpoints`` is how many are on disk at the same time.
    """

    processes: int
    threads: int
    folder: Path
    needs_gpu: bool = False
    checkpoint_bytes: int | None = None
    checkpoints: int = 1


def least(name: str, value: float, limits: tuple[float, float], found: str, advice: str) -> Check:
    """Fails below ``limits[0]`` and warns below ``limits[1]``."""
    if value >= limits[1]:
        return Check(name, "ok", found)
    return Check(name, "fail" if value < limits[0] else "warn", f"{found}; at least {limits[1]:g} recommended", advice)


def check_machine(needs: Needs, gpus: int) -> Iterator[Check]:
    """Checks of this node that need neither another node nor a device."""
    yield from check_versions()
    yield _cores(needs)
    yield _memory(needs, gpus)
    yield _shared_memory()
    yield from _limits()
    yield _temporary()
    yield _disk(needs)
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        advice = "install gcc: Triton and Inductor compile kernels while the engines start"
        yield Check("compiler", "warn", "no C compiler", advice)


def check_versions() -> Iterator[Check]:
    """Checks the supported releases, and whether the installed packages satisfy each other's requirements."""
    versions = installed_versions()
    problems = [*violations(versions), *misfits()]
    if problems:
        advice = "install what requirements/ pins: bash launch/quickstart.sh --setup-only"
        for problem in problems:
            yield Check("versions", "fail", problem, advice)
        return
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Check("versions", "ok", f"Python {platform.python_version()}, {found}")


def misfits(of: tuple[str, ...] | None = None) -> list[str]:
    """One line per installed package whose release does not satisfy a requirement of one of the main libraries.

    A package that is not installed is not listed: some declared requirements are left out on purpose.
    """
    names = of if of is not None else tuple(name for item in REQUIREMENTS for name in item.distributions)
    lines = []
    for name in names:
        try:
            declared = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, declared):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                lines.append(f"{requirement.name}: found {version}; {name} needs {requirement.specifier}")
    return lines


def _cores(needs: Needs) -> Check:
    cores, wanted = len(os.sched_getaffinity(0)), needs.processes * needs.threads
    found = f"{cores} for {needs.processes} process(es) of {needs.threads} thread(s)"
    if cores >= wanted:
        return Check("cores", "ok", found)
    advice = "more cores for the task (srun --cpu-bind=none, sbatch --exclusive), or fewer threads_per_process"
    return Check("cores", "warn", found, advice)


def _memory(needs: Needs, gpus: int) -> Check:
    left, used, limit = psutil.virtual_memory().available, cgroup_bytes("memory.current"), cgroup_bytes("memory.max")
    if used is not None and limit is not None:
        left = min(left, max(0, limit - used))
    low, well = (_GPU_PROCESS if gpus else _CPU_PROCESS) if needs.processes else (0.0, 0.0)
    limits = low * needs.processes, well * needs.processes
    advice = "stop other processes on this node, request more memory (Slurm: --mem=0), or run fewer processes per node"
    return least("memory", left / _GIB, limits, f"{left / _GIB:.1f} GiB free", advice)


def _shared_memory() -> Check:
    free = free_bytes(Path("/dev/shm"))
    if free is None:
        return Check("shared memory", "warn", "no /dev/shm", "mount a tmpfs there")
    advice = "a larger /dev/shm: docker --shm-size, or the container's own mount"
    return least("shared memory", free / _GIB, _SHARED_MEMORY_GIB, f"{free / _GIB:.1f} GiB free in /dev/shm", advice)


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = float("inf") if soft == resource.RLIM_INFINITY else soft
    # few runs need more than the first limit, so warn only if the user cannot raise it
    reach = float("inf") if hard == resource.RLIM_INFINITY else hard
    advice = "raise it: ulimit -n 65536 before sbatch, or LimitNOFILE of slurmd and limits.conf on that node"
    if files < _OPEN_FILES[0]:
        yield Check("open files", "fail", f"at most {soft}; {_OPEN_FILES[0]} are needed", advice)
    elif max(files, reach) < _OPEN_FILES[1] and files < 4096:
        yield Check("open files", "warn", f"at most {soft}; at least 4096 recommended", advice)
    else:
        yield Check("open files", "ok", f"at most {'any number' if soft == resource.RLIM_INFINITY else soft}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "any amount" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB"
    links = sorted(path.name for path in _HARDWARE_LINKS.glob("*"))
    if links and locked != resource.RLIM_INFINITY:
        advice = "InfiniBand registers memory: LimitMEMLOCK=infinity for slurmd, or ulimit -l unlimited"
        yield Check("locked memory", "fail", f"{found}, with {', '.join(links)}", advice)
    else:
        yield Check("locked memory", "ok", f"{found}{'' if links else ', and no InfiniBand that needs more'}")


def _temporary() -> Check:
    folder = Path(tempfile.gettempdir())
    free = free_bytes(folder) or 0
    advice = "clear it, or set TMPDIR to a folder of this node with more space"
    found = f"{free / _GIB:.1f} GiB free in {folder}"
    return least("temporary files", free / _GIB, (0.1, _TEMPORARY_GIB), found, advice)


def _disk(needs: Needs) -> Check:
    free = free_bytes(needs.folder.absolute()) or 0
    found = f"{free / _GIB:.1f} GiB free for {needs.folder}"
    advice = "another run.dir, or fewer trainer.keep_checkpoints"
    one = needs.checkpoint_bytes
    if one is None:
        return least("disk", free / _GIB, (1.0, 10.0), found, advice)
    found += f"; a checkpoint takes about {one / _GIB:.2g} GiB"
    # the next checkpoint is written before the oldest is removed
    return least("disk", free / _GIB, (one / _GIB, one * (needs.checkpoints + 1) / _GIB), found, advice)


def guarded(name: str, checks: Callable[[], Iterator[Check]]) -> list[Check]:
    """Runs the checks; a check that raises becomes a failed row."""
    done: list[Check] = []
    try:
        for check in checks():
            done.append(check)
    except Exception as error:
        done.append(Check(name, "fail", f"{type(error).__name__}: {error}", "run it alone on that node to see why"))
    return done
