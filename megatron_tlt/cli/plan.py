"""``tlt plan CONFIG --reshard``: what moving the weights would move, without GPUs, weights or a process group."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from megatron_tlt.cli import plan_cluster, runs
from megatron_tlt.cli.plan_tables import print_reshard
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import RolloutConfig, TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.reshard.actor_layout import actor_side
from megatron_tlt.reshard.engine_layout import engine_side
from megatron_tlt.reshard.plan import ReshardPlan, make_plan
from megatron_tlt.reshard.projection import Bandwidths
from megatron_tlt.reshard.spans import tensor_forms
from megatron_tlt.reshard.summary import summarize

_RATES = {
    "nvlink": "of NVLink, per GPU and direction",
    "network": "between nodes, per GPU and direction",
    "memory": "of a GPU's memory",
    "wake": "at which a sleeping engine's memory is mapped again",
}
_EFFICIENCIES = ("nvlink_efficiency", "network_efficiency", "memory_efficiency")
_WIDE = ("float32", "float")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="say what a config would do, without GPUs or weights")
    runs.add_config_arguments(parser)
    planned = parser.add_mutually_exclusive_group(required=True)
    planned.add_argument("--reshard", action="store_true", help="plan the transfer of weights to the engines")
    planned.add_argument(
        "--cluster", metavar="FILE", type=Path, help="plan for unequal devices: launch/clusters/*.yaml"
    )
    plan_cluster.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure here")
    parser.add_argument("--plan", metavar="FILE", type=Path, help="write the plan itself here")
    for name, what in _RATES.items():
        default = getattr(Bandwidths(), name)
        parser.add_argument(f"--{name}", metavar="GB/S", type=float, help=f"rate {what} (default {default:g})")
    parser.add_argument(
        "--efficiency", metavar="F", type=float, help="fraction reached of NVLink's, the network's and memory's rates"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.cluster is not None:
        return plan_cluster.run(arguments, load_config(arguments.config, arguments.overrides))
    bandwidths = _bandwidths(arguments)
    plan = reshard_plan(load_config(arguments.config, arguments.overrides))
    summary = summarize(plan, bandwidths)
    if arguments.json is not None:
        atomic_write_text(arguments.json, json.dumps(summary, indent=1) + "\n")
    if arguments.plan is not None:
        plan.write(arguments.plan)
    print_reshard(summary)
    return 0


def reshard_plan(config: TltConfig) -> ReshardPlan:
    """The plan of a config's transfer; weights travel in the engines' dtype.

    Raises:
        ConfigError: the model's architecture is not to be had, or a layout cannot be planned.
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
    """Bytes of an engine's element; where its dtype is left to vLLM it takes one of two bytes."""
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
