"""``tlt plan CONFIG --search``: finds the best layout for a config's devices, and writes a launch config."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron_tlt.cli.plan_tables import print_search
from megatron_tlt.cli.planned import graphs_of, machine_of, mean_response, memory_of
from megatron_tlt.cli.planned_config import fitting_spot, parent_of, write_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.source import apply_overrides, deep_merge
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.job import Job, job_of
from megatron_tlt.planning.layout_search import SearchResult, overrides_of, search
from megatron_tlt.planning.machine import Machine
from megatron_tlt.planning.memory import MemoryPlan, plan_memory
from megatron_tlt.planning.summary import summarize_search
from megatron_tlt.platform.files import atomic_write_text


def search_layout(config: TltConfig, arguments: argparse.Namespace) -> int:
    """Searches, prints and writes; raises ConfigError if nothing fits, or a config file would overwrite its parent."""
    job, machine = job_of(config), machine_of(config, arguments.devices)
    mean = mean_response(arguments.mean_response, config)
    result = find_layouts(config, job, machine, mean)
    if not result.best:
        smallest = memory_of(config, job, machine).capacity / 1e9
        raise ConfigError(
            f"--search: none of {result.layouts} layouts of {job.world} devices of {smallest:.0f} GB fits; "
            "allowed: more or larger devices, shorter responses, a smaller drafter"
        )
    summary = summarize_search(job, machine, result)
    if arguments.json is not None:
        atomic_write_text(arguments.json, json.dumps(summary, indent=1) + "\n")
    print_search(summary)
    if arguments.write is not None:
        _write(arguments, config, result, machine)
    return 0


def find_layouts(config: TltConfig, job: Job, machine: Machine, mean: float) -> SearchResult:
    graphs = graphs_of(config, job, machine)
    capacity = machine.memory_bytes / (job.devices_per_node if machine.is_cpu else 1)

    def plan(choice: Job) -> MemoryPlan:
        return plan_memory(choice, capacity, graphs, on_gpu=not machine.is_cpu)

    return search(job, machine, plan, mean)


def _write(arguments: argparse.Namespace, config: TltConfig, result: SearchResult, machine: Machine) -> None:
    best = result.best[0]
    own: dict[str, Any] = {}
    apply_overrides(own, arguments.overrides)
    own = deep_merge(own, overrides_of(best.job))
    own = deep_merge(own, fitting_spot(config, best.job.world // best.job.engine.tp))
    path = arguments.write
    comments = [
        f"The fastest of {result.layouts} layouts for {best.job.world} devices ({machine.name}: {machine.source}).",
        f"Computed: {best.total:.0f} s a step without speculation, margin {best.margin / 1e9:.1f} GB per device.",
    ]
    run = {"name": path.stem, "dir": f"runs/{path.stem}"}
    write_config(path, comments, {"defaults": [parent_of(path, arguments.config)], "run": run} | own)
