"""Common inputs of all plans: the machine, and a config's memory on it."""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import DEFAULT_DEVICE
from megatron_tlt.planning.job import Job
from megatron_tlt.planning.machine import CPU, Machine, constants, find_machine
from megatron_tlt.planning.memory import MemoryPlan, plan_memory
from megatron_tlt.rollout.vllm_graphs import pool_of
from megatron_tlt.speculation.graph_pool import GraphPlan

PROFILE = Path("runs/profile.json")
"""Default path of ``--profile``, also read by plans for this machine."""


def machine_of(config: TltConfig, given: str | None) -> Machine:
    """The machine that ``--devices`` names, or the config's default; raises ConfigError like ``find_machine``."""
    if given is not None:
        return find_machine(given)
    on_cpu = config.actor.transformer_impl == "local"
    if PROFILE.is_file() and (found := find_machine(str(PROFILE))).is_cpu == on_cpu:
        return found
    return find_machine(CPU if on_cpu else DEFAULT_DEVICE)


def memory_of(config: TltConfig, job: Job, machine: Machine) -> MemoryPlan:
    """Memory per device; processes on one processor share its memory equally."""
    capacity = machine.memory_bytes / (job.devices_per_node if machine.is_cpu else 1)
    return plan_memory(job, capacity, graphs_of(config, job, machine), on_gpu=not machine.is_cpu)


def graphs_of(config: TltConfig, job: Job, machine: Machine) -> GraphPlan | None:
    """The CUDA graphs that an engine captures."""
    if machine.is_cpu or config.rollout.vllm.get("enforce_eager") is True:
        return None
    return pool_of(config.speculation, job.engine.max_sequences, job.engine.batched_tokens)


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
