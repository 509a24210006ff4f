"""Common inputs of all plans (the machine, a config's memory on it), and the launch configs that they write.

A written config inherits from the original and contains only the changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.shipped import LAUNCH, find_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import DEFAULT_DEVICE, runs_on_gpu
from megatron_tlt.planning.elastic import LayoutChooser
from megatron_tlt.planning.job import Job, job_of
from megatron_tlt.planning.layout_search import SearchResult, search
from megatron_tlt.planning.machine import CPU, Machine, constants, find_machine
from megatron_tlt.planning.memory import MemoryPlan, plan_memory
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.rollout.adaptive import engine_graphs
from megatron_tlt.speculation.graph_pool import GraphPlan

PROFILE = Path("runs/profile.json")
"""Default path of ``--profile``, also read by plans for this machine."""


def machine_of(config: TltConfig, given: str | None) -> Machine:
    """The machine that ``--devices`` names, or one of the kind that the config runs on.

    Raises ConfigError like ``find_machine``.
    """
    if given is not None:
        return find_machine(given)
    on_gpu = runs_on_gpu(config)
    if PROFILE.is_file() and (found := find_machine(str(PROFILE))).is_cpu != on_gpu:
        return found
    return find_machine(DEFAULT_DEVICE if on_gpu else CPU)


def memory_of(config: TltConfig, job: Job, machine: Machine) -> MemoryPlan:
    """Memory per device; processes on one processor share its memory equally."""
    capacity = machine.memory_bytes / (job.devices_per_node if machine.is_cpu else 1)
    return plan_memory(job, capacity, graphs_of(config, job, machine), on_gpu=not machine.is_cpu)


def graphs_of(config: TltConfig, job: Job, machine: Machine) -> GraphPlan | None:
    """The CUDA graphs that an engine captures."""
    if machine.is_cpu:
        return None
    return engine_graphs(config.rollout, config.speculation, job.engine.max_sequences, job.engine.batched_tokens)


def mean_response(given: float | None, config: TltConfig) -> float:
    """Mean response tokens: from ``--mean-response``, else a fraction of the longest (``constants.yaml``).

    Raises:
        ConfigError: it is not above 0, or exceeds the longest that the config allows.
    """
    longest = config.rollout.max_response_tokens
    if given is None:
        return constants()["workload"]["mean_fraction"] * longest
    if not 0 < given <= longest:
        raise ConfigError(f"--mean-response: found {given:g}; allowed: above 0, at most {longest}")
    return given


def parent_of(path: Path, base: Path) -> str:
    """The entry for ``base`` in ``defaults`` of a config at ``path``; raises ConfigError if they are the same file."""
    base = find_config(base)
    if path.resolve() == base.resolve():
        raise ConfigError(f"--write: found {path}, which is the config itself; allowed: another file")
    if (inside := base.resolve()).is_relative_to(LAUNCH):
        return str(inside.relative_to(LAUNCH))  # found wherever the package is installed
    return os.path.relpath(base.resolve(), path.resolve().parent)


def fitting_spot(config: TltConfig, engines: int) -> dict[str, Any]:
    """The ``spot`` section for ``engines`` engines: the last one ends the rollout, all others may train."""
    if config.spot is None or (engines > 1 and (config.spot.min_replicas or 1) < engines):
        return {}
    return {"spot": {"min_replicas": engines - 1} if engines > 1 else None}


def search_layouts(config: TltConfig, machine: Machine, mean: float, reserve: float = 0.0) -> SearchResult:
    """The fastest layouts for the config's devices that fit and leave the fraction ``reserve`` of a device's memory."""
    job = job_of(config, not machine.is_cpu)
    # choices differ neither in an engine's graphs nor in a device's memory
    graphs, capacity = graphs_of(config, job, machine), memory_of(config, job, machine).capacity

    def plan(own: Job) -> MemoryPlan:
        return replace(plan_memory(own, capacity, graphs, on_gpu=not machine.is_cpu), reserve=reserve)

    return search(job, machine, plan, mean)


def layout_chooser(
    config: TltConfig,
    machine: Machine,
    mean: float,
    *,
    prompts: int | None = None,
    strict: bool = False,
    logical_shards: int | None = None,
) -> LayoutChooser:
    """Chooses layouts of the config for other numbers of devices, with its batch or that of ``prompts`` problems.

    Raises ConfigError like ``best_layout``.
    """
    job = job_of(config, not machine.is_cpu)
    if prompts is not None:
        job = replace(job, prompts=prompts, responses=prompts * config.algorithm.group_size)
    graphs, capacity = graphs_of(config, job, machine), memory_of(config, job, machine).capacity

    def plan(own: Job) -> MemoryPlan:
        return plan_memory(own, capacity, graphs, on_gpu=not machine.is_cpu)

    return LayoutChooser(job, machine, plan, mean, strict=strict, logical_shards=logical_shards)


_load = partial(load_config, check_libraries=False)


def load_text(path: Path, text: str, load: Callable[[Path], TltConfig] = _load) -> TltConfig:
    """The config that a file at ``path`` with this text would be; raises ConfigError if it is not valid."""
    draft = path.with_name(f".{path.name}.draft.yaml")
    try:
        atomic_write_text(draft, text)
        return load(draft)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(draft), str(path))) from error
    finally:
        draft.unlink(missing_ok=True)


def write_config(path: Path, comments: Sequence[str], values: Mapping[str, Any]) -> None:
    """Writes a launch config if it loads; an invalid one leaves nothing at ``path``.

    Raises:
        ConfigError: it is not valid.
    """
    text = "\n".join([*(f"# {line}" for line in comments), yaml.safe_dump(dict(values), sort_keys=False, width=120)])
    load_text(path, text)
    atomic_write_text(path, text)
