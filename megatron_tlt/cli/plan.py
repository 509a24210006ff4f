"""``tlt plan CONFIG``: memory and time of a step, the weight transfer, the best layout; without GPUs or weights."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from megatron_tlt.cli import plan_cluster, preflight, runs
from megatron_tlt.cli.plan_profile import measure_machine
from megatron_tlt.cli.plan_search import search_layout
from megatron_tlt.cli.plan_tables import print_reshard, print_step
from megatron_tlt.cli.planned import PROFILE, machine_of, mean_response, memory_of
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.schema import RolloutConfig, TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.planning.cost import step_time
from megatron_tlt.planning.devices import DEFAULT_DEVICE
from megatron_tlt.planning.job import Job, job_of
from megatron_tlt.planning.machine import CPU, Machine
from megatron_tlt.planning.remedies import remedies
from megatron_tlt.planning.summary import summarize_step
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.reshard.actor_layout import actor_side
from megatron_tlt.reshard.engine_layout import engine_side
from megatron_tlt.reshard.plan import ReshardPlan, make_plan
from megatron_tlt.reshard.projection import Bandwidths, project
from megatron_tlt.reshard.spans import tensor_forms
from megatron_tlt.reshard.summary import summarize

_RATES = {
    "nvlink": "of NVLink, per GPU and direction",
    "network": "between nodes, per GPU and direction",
    "memory": "of a GPU's memory",
    "wake": "of mapping a sleeping engine's memory",
}
_EFFICIENCIES = ("nvlink_efficiency", "network_efficiency", "memory_efficiency")
_WIDE = ("float32", "float")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="estimate a config's memory and time, without GPUs or weights")
    runs.add_config_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--reshard", action="store_true", help="plan the transfer of weights to the engines only")
    what.add_argument("--search", action="store_true", help="find the best layout for the config's devices")
    what.add_argument("--cluster", metavar="FILE", type=Path, help="plan for unequal devices: launch/clusters/*.yaml")
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
        f"else {DEFAULT_DEVICE}, or {CPU} if actor.transformer_impl is local)",
    )
    parser.add_argument("--mean-response", metavar="TOKENS", type=float, help="mean response length (default: assumed)")
    plan_cluster.add_arguments(parser)
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
        return measure_machine(config, arguments.profile)
    if arguments.search:
        return search_layout(config, arguments)
    if arguments.reshard:
        return _reshard(config, bandwidths, arguments)
    return _step(config, bandwidths, arguments)


def _reshard(config: TltConfig, bandwidths: Bandwidths, arguments: argparse.Namespace) -> int:
    plan = reshard_plan(config)
    summary = summarize(plan, bandwidths)
    _write_json(arguments, summary)
    if arguments.plan is not None:
        plan.write(arguments.plan)
    print_reshard(summary)
    return 0


def _step(config: TltConfig, bandwidths: Bandwidths, arguments: argparse.Namespace) -> int:
    job, machine = job_of(config), machine_of(config, arguments.devices)
    memory = memory_of(config, job, machine)
    plan = reshard_plan(config)
    projected = project(plan, bandwidths).total if not machine.is_cpu else plan.moved_bytes / machine.node_link
    seconds = step_time(job, machine, memory, mean_response(arguments.mean_response, config), projected)
    summary = summarize_step(job, machine, memory, seconds, plan.moved_bytes)
    _write_json(arguments, summary)
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


def _write_json(arguments: argparse.Namespace, summary: dict[str, Any]) -> None:
    if arguments.json is not None:
        atomic_write_text(arguments.json, json.dumps(summary, indent=1) + "\n")


def reshard_plan(config: TltConfig) -> ReshardPlan:
    """The plan of a config's weight transfer, in the engines' dtype.

    Raises:
        ConfigError: the model's architecture is unavailable, or a layout cannot be planned.
    """
    launcher, rollout = config.launcher, config.rollout
    world = launcher.world_size
    weights = WeightMap(*sizes_of(config))
    actor = actor_side(weights, Layout.read(config.actor.megatron, world))
    spread = rollout.vllm.get("enable_expert_parallel") is True
    engines = engine_side(weights, world, rollout.tensor_parallel_size, spread)
    nodes = [rank // launcher.nproc_per_node for rank in range(world)]
    return make_plan(tensor_forms(weights, _itemsize(rollout)), actor, engines, nodes)


def _itemsize(rollout: RolloutConfig) -> int:
    """Bytes of an engine's element; vLLM's default dtype has two bytes."""
    return 4 if rollout.vllm.get("dtype") in _WIDE else 2


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
