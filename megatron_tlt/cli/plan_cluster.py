"""``tlt plan CONFIG --cluster FILE``: assigns tasks to unequal devices, and shows what this package can run."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict

from rich.console import Console

from megatron_tlt.cli import runs
from megatron_tlt.cli.plan_tables import print_plan
from megatron_tlt.cli.planned import fitting_spot, mean_response, parent_of, write_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.planning.hetero.cluster import Cluster, read_cluster
from megatron_tlt.planning.hetero.cost import CostModel
from megatron_tlt.planning.hetero.plan import Plan
from megatron_tlt.planning.hetero.report import PlanReport, describe
from megatron_tlt.planning.hetero.search import search
from megatron_tlt.planning.hetero.speeds import SpeedLists, speeds_of
from megatron_tlt.planning.hetero.uniform import uniform_plan
from megatron_tlt.planning.hetero.workflow import Workflow, workflow_of
from megatron_tlt.planning.model_size import ModelSize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that apply only with ``--cluster``."""
    group = parser.add_argument_group("unequal devices")
    group.add_argument("--evaluations", metavar="N", type=int, default=5000, help="plans to evaluate (default 5000)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the search (default 0)")
    group.add_argument("--asynchronous", action="store_true", help="plan for rollouts that are one step ahead")


def run(arguments: argparse.Namespace, config: TltConfig) -> int:
    """Prints the best plan found, then the best that this package can run.

    Raises:
        ConfigError: the cluster file is invalid; no plan found fits (the message names the short memory); with
            ``--write``, no plan that can run today fits.
    """
    if arguments.evaluations < 1:
        raise ConfigError(f"--evaluations: found {arguments.evaluations}; allowed: at least 1")
    mean = mean_response(arguments.mean_response, config)
    cluster = read_cluster(arguments.cluster)
    workflow = workflow_of(config, ModelSize.of(sizes_of(config)[0]), mean, asynchronous=arguments.asynchronous)
    model, even = CostModel(cluster, workflow), CostModel(cluster, workflow, balanced=False)
    # a model that treats devices as equal, but balances shares by speed
    equal = uniform_plan(even).plan
    found = search(model, arguments.evaluations, arguments.seed)
    # one world: all tasks take turns on all devices, with even layers and with shares by speed
    as_run = CostModel(cluster, workflow, as_run=True)
    equal_nodes = len(set(Counter(cluster.node_of).values())) == 1
    today = uniform_plan(as_run, whole=True).plan if equal_nodes else None
    plan = min((found.plan, equal, *([today] if today else [])), key=lambda one: model(one).seconds)
    report = describe(model, plan)
    if report.shortages:
        lines = "\n".join(f"{arguments.cluster}: {line}" for line in report.shortages)
        raise ConfigError(f"{lines}\n{arguments.cluster}: none of {found.evaluations} plans fits; this was the nearest")
    today_report = describe(as_run, today) if today is not None else None
    speeds, even_seconds = None, None
    if today is not None and today_report is not None and not today_report.shortages:
        speeds = speeds_of(as_run, today, config.trainer.prompts_per_step)
        even_seconds = uniform_plan(even, whole=True).seconds
    _print(cluster, workflow, mean, report, today_report, speeds, even_seconds)
    figures = {
        "cluster": cluster.summary(),
        "best": asdict(report),
        "runs_today": today_report and asdict(today_report),
        "speeds": speeds,
        "even_shares_seconds": even_seconds,
    }
    runs.write_json(arguments.json, figures)
    if arguments.write is not None:
        if today is None or today_report is None or today_report.shortages:
            why = _UNEQUAL_NODES if today_report is None else "; ".join(today_report.shortages)
            raise ConfigError(f"--write: nothing that can run today fits {arguments.cluster}: {why}")
        _write(arguments, config, cluster, workflow, today, speeds)
    return 0


_UNEQUAL_NODES = "every node needs the same number of devices, divisible by engines and stages"


def _print(
    cluster: Cluster,
    workflow: Workflow,
    mean: float,
    report: PlanReport,
    today: PlanReport | None,
    speeds: SpeedLists | None,
    even_seconds: float | None,
) -> None:
    console = Console(highlight=False)
    console.print(f"{cluster.summary()}; responses of {mean:g} tokens on average")
    way = "one step ahead" if workflow.asynchronous else "synchronous"
    console.print(f"best plan found: {report.step_seconds:.1f} s a step, {way}; advice, see below for what runs today")
    print_plan(report, console)
    if today is None:
        console.print(f"no part of it can run today: {_UNEQUAL_NODES}")
    elif today.shortages:
        console.print("one world over all devices, which is what runs today, does not fit:")
        for line in today.shortages:
            console.print(f"  {line}")
    else:
        layouts = ", ".join(f"{task.name} {task.layout}" for task in today.tasks)
        ratio = today.step_seconds / report.step_seconds
        console.print(
            f"one world over all devices, which is what runs today: {today.step_seconds:.1f} s a step, {ratio:.2f} "
            f"times the best plan's ({layouts})"
        )
        if speeds is None:
            console.print("all replicas and engines of it are equally fast, so shares are even")
        else:
            assert even_seconds is not None
            # one line, so that it can be copied
            console.print("its shares, for the launch config (nodes in the order of the cluster file):")
            console.print(f"speeds: {json.dumps(speeds)}", soft_wrap=True)
            console.print(f"with even shares, without this key: {even_seconds:.1f} s a step")


def _write(
    arguments: argparse.Namespace,
    config: TltConfig,
    cluster: Cluster,
    workflow: Workflow,
    plan: Plan,
    speeds: SpeedLists | None,
) -> None:
    """Writes the config with layout and shares of a one-world plan; nodes in the order of the cluster file."""
    rollout, actor = (plan.placements[workflow.index(name)].layout for name in ("rollout", "actor"))
    megatron = {
        "tensor_model_parallel_size": actor.tp,
        "pipeline_model_parallel_size": actor.pp,
        "context_parallel_size": 1,
    }
    values = {
        "defaults": [parent_of(arguments.write, arguments.config)],
        "launcher": {"nnodes": len(cluster.nodes), "nproc_per_node": cluster.size // len(cluster.nodes)},
        "actor": {"megatron": megatron | ({"sequence_parallel": False} if actor.tp == 1 else {})},
        "rollout": {"tensor_parallel_size": rollout.tp},
        **fitting_spot(config, cluster.size // rollout.tp),
        "speeds": speeds,
    }
    order = f"For {cluster.summary()}, in the order of {arguments.cluster.name}: {', '.join(cluster.nodes)}."
    write_config(arguments.write, [order], values)
