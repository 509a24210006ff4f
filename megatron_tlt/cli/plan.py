"""``tlt plan CONFIG``: memory and time of a step, the weight transfer, the best layout, other sizes; without GPUs.

``--profile`` measures this machine's achieved rates for later plans.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from megatron_tlt.cli import plan_cluster, plan_elastic, preflight, runs
from megatron_tlt.cli.plan_tables import print_reshard, print_search, print_step
from megatron_tlt.cli.planned import (
    PROFILE,
    fitting_spot,
    machine_of,
    mean_response,
    memory_of,
    parent_of,
    search_layouts,
    write_config,
)
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.source import apply_overrides, deep_merge
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.planning.cost import step_time
from megatron_tlt.planning.devices import DEFAULT_DEVICE
from megatron_tlt.planning.job import Job, job_of
from megatron_tlt.planning.layout_search import SearchResult, overrides_of
from megatron_tlt.planning.machine import CPU, Machine, read_profile
from megatron_tlt.planning.remedies import remedies
from megatron_tlt.planning.summary import summarize_search, summarize_step
from megatron_tlt.platform.processes import run_processes
from megatron_tlt.reshard.actor_layout import actor_side
from megatron_tlt.reshard.engine_layout import engine_side
from megatron_tlt.reshard.plan import ReshardPlan, make_plan
from megatron_tlt.reshard.projection import Bandwidths, project, summarize
from megatron_tlt.reshard.spans import tensor_forms

_RATES = {
    "nvlink": "of NVLink, per GPU and direction",
    "network": "between nodes, per GPU and direction",
    "memory": "of a GPU's memory",
    "wake": "of mapping a sleeping engine's memory",
}
_EFFICIENCIES = ("nvlink_efficiency", "network_efficiency", "memory_efficiency")
_PROFILER = "megatron_tlt.cli.workers.profile"
_PROFILE_TIMEOUT_S = 600


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="estimate a config's memory and time, without GPUs or weights")
    runs.add_config_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--reshard", action="store_true", help="plan the transfer of weights to the engines only")
    what.add_argument("--search", action="store_true", help="find the best layout for the config's devices")
    what.add_argument("--elastic", action="store_true", help="find the layouts of other numbers of nodes")
    what.add_argument("--cluster", metavar="FILE", type=Path, help="plan for unequal devices: a cluster file")
    what.add_argument(
        "--profile",
        metavar="FILE",
        nargs="?",
        const=PROFILE,
        type=Path,
        help=f"measure this machine with the config's processes per node (default: {PROFILE})",
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help="with --search and --cluster: write a launch config")
    parser.add_argument(
        "--devices",
        metavar="NAME|FILE",
        help=f"a known device, `{CPU}`, or a profile (default: {PROFILE} if it is of the config's kind of device, "
        f"else {DEFAULT_DEVICE}, or {CPU} for a config without keys for GPUs where there is no GPU)",
    )
    parser.add_argument("--mean-response", metavar="TOKENS", type=float, help="mean response length (default: assumed)")
    plan_cluster.add_arguments(parser)
    plan_elastic.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures to FILE")
    parser.add_argument("--plan", metavar="FILE", type=Path, help="with --reshard: write the plan itself to FILE")
    for name, words in _RATES.items():
        default = getattr(Bandwidths(), name)
        parser.add_argument(f"--{name}", metavar="GB/S", type=float, help=f"rate {words} (default {default:g})")
    parser.add_argument(
        "--efficiency", metavar="F", type=float, help="achieved fraction of the rates of NVLink, network and memory"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.cluster is not None:
        return plan_cluster.run(arguments, preflight.load_checked(arguments.config, arguments.overrides, starts=False))
    bandwidths = _bandwidths(arguments)
    if arguments.plan is not None and not arguments.reshard:
        raise ConfigError("--plan: found without --reshard; allowed: with it")
    if arguments.write is not None and not arguments.search:
        raise ConfigError("--write: found without --search or --cluster; allowed: with one of them")
    config = preflight.load_checked(arguments.config, arguments.overrides, starts=False)
    if arguments.profile is not None:
        return _measure(config, arguments.profile)
    if arguments.search:
        return _search(config, arguments)
    if arguments.elastic:
        return plan_elastic.run(arguments, config)
    if arguments.reshard:
        return _reshard(config, bandwidths, arguments)
    return _step(config, bandwidths, arguments)


def _reshard(config: TltConfig, bandwidths: Bandwidths, arguments: argparse.Namespace) -> int:
    plan = reshard_plan(config)
    summary = summarize(plan, bandwidths)
    runs.write_json(arguments.json, summary)
    if arguments.plan is not None:
        plan.write(arguments.plan)
    print_reshard(summary)
    return 0


def _step(config: TltConfig, bandwidths: Bandwidths, arguments: argparse.Namespace) -> int:
    machine = machine_of(config, arguments.devices)
    job = job_of(config, not machine.is_cpu)
    memory = memory_of(config, job, machine)
    plan = reshard_plan(config)
    projected = project(plan, bandwidths).total if not machine.is_cpu else plan.moved_bytes / machine.node_link
    seconds = step_time(job, machine, memory, mean_response(arguments.mean_response, config), projected)
    summary = summarize_step(job, machine, memory, seconds, plan.moved_bytes)
    runs.write_json(arguments.json, summary)
    print_step(summary)
    if not memory.fits:
        raise ConfigError("\n".join([*memory.problems(), *_what_fits(config, job, machine)]))
    return 0


def _what_fits(config: TltConfig, job: Job, machine: Machine) -> list[str]:
    found = remedies(job, lambda changed: memory_of(config, changed, machine))
    if not found:
        return [
            "what would fit: more or larger devices; few changes of layout, recompute, batch or engine do not suffice"
        ]
    return [f"what would fit: {' '.join(remedy.overrides)} (margin {remedy.margin / 1e9:.1f} GB)" for remedy in found]


def reshard_plan(config: TltConfig) -> ReshardPlan:
    """The plan of a config's weight transfer, in the engines' dtype.

    Raises:
        ConfigError: the model's architecture is unavailable, or a layout cannot be planned.
    """
    job, weights = job_of(config), WeightMap(*sizes_of(config))
    engines = engine_side(weights, job.world, job.engine.tp, job.engine.spread_experts)
    nodes = [rank // job.devices_per_node for rank in range(job.world)]
    forms = tensor_forms(weights, job.engine.itemsize)
    return make_plan(forms, actor_side(weights, job.actor.layout), engines, nodes)


def _bandwidths(arguments: argparse.Namespace) -> Bandwidths:
    problems = []
    given = {name: getattr(arguments, name) for name in _RATES if getattr(arguments, name) is not None}
    for name, rate in given.items():
        if not (math.isfinite(rate) and rate > 0):
            problems.append(f"--{name}: found {rate:g}; allowed: GB/s above 0")
    efficiency = arguments.efficiency
    if efficiency is not None:
        if not 0 < efficiency <= 1:
            problems.append(f"--efficiency: found {efficiency:g}; allowed: above 0, at most 1")
        given |= dict.fromkeys(_EFFICIENCIES, efficiency)
    if problems:
        raise ConfigError("\n".join(problems))
    return Bandwidths(**given)


def _measure(config: TltConfig, path: Path) -> int:
    """Measures with the config's processes per node, and writes a profile.

    Raises:
        RunError: a process failed or took too long; shows the end of its log.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    processes = config.launcher.nproc_per_node
    run_processes("--profile", _PROFILER, [str(path)], processes, _PROFILE_TIMEOUT_S)
    machine = read_profile(path)
    print(f"{path}: {machine.name}")
    for side, rate in machine.matmul:
        print(f"  products with a smallest side of {side}: {rate / 1e9:.1f} GFLOP/s")
    print(f"  attention {machine.attention / 1e9:.1f} GFLOP/s, memory {machine.memory_bandwidth / 1e9:.1f} GB/s")
    print(f"  all-reduce {machine.node_link / 1e9:.2f} GB/s per process")
    for ranks, seconds in machine.collective_latency:
        print(f"  a small all-reduce among {ranks}: {seconds * 1e6:.0f} us")
    if machine.sharing(processes) > 1:
        print(f"  rates are per process with its own core; {processes} processes share {machine.cores} cores")
    return 0


def _search(config: TltConfig, arguments: argparse.Namespace) -> int:
    """Searches, prints and writes; raises ConfigError if nothing fits, or a config file would overwrite its parent."""
    machine = machine_of(config, arguments.devices)
    job = job_of(config, not machine.is_cpu)
    result = search_layouts(config, machine, mean_response(arguments.mean_response, config))
    if not result.best:
        capacity = memory_of(config, job, machine).capacity
        raise ConfigError(
            f"--search: none of {result.layouts} layouts of {job.world} devices of {capacity / 1e9:.0f} GB fits; "
            "allowed: more or larger devices, shorter responses, a smaller drafter"
        )
    summary = summarize_search(job, machine, result)
    runs.write_json(arguments.json, summary)
    print_search(summary)
    if arguments.write is not None:
        _write(arguments, config, result, machine)
    return 0


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
