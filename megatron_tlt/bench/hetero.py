"""Plans over unequal devices: against the exhaustive optimum, random search, no swaps, and plans for equal devices."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import count, islice
from typing import Any

from megatron_tlt.bench.hetero_cases import mixed_64, model, small_instance, step
from megatron_tlt.bench.hetero_exhaustive import Exhaustive
from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.planning.hetero.cluster import Cluster
from megatron_tlt.planning.hetero.cost import CostModel
from megatron_tlt.planning.hetero.search import HeteroSearchResult, random_search, search
from megatron_tlt.planning.hetero.uniform import uniform_plan
from megatron_tlt.planning.hetero.workflow import Workflow

LIMIT = 1.02
_MODELS = ("Qwen2.5-7B", "Qwen2.5-14B")
_METHODS: dict[str, Callable[[CostModel, int, int], HeteroSearchResult]] = {
    "search": search,
    "random": random_search,
    "without swaps": functools.partial(search, swaps=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=60, help="number of feasible small clusters")
    parser.add_argument("--first-instance", type=int, default=0, help="number of the first cluster")
    parser.add_argument("--seeds", type=int, default=21, help="runs of each method on 64 devices")
    parser.add_argument("--small-evaluations", type=int, default=4000, help="budget on a small cluster")
    parser.add_argument("--evaluations", type=int, default=3000, help="budget of each method on 64 devices")
    parser.add_argument("--sequences", type=int, default=2048, help="responses per step on 64 devices")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Compares plans by the cost model's seconds; nothing is measured.

    The budget is the number of evaluated plans. Random search draws from the same distribution as the search's initial
    populations. The plan for equal devices has the best layouts, even shares, and the devices in their listed order.
    """
    result = BenchmarkResult(environment=describe_environment(), name="hetero")
    cluster = mixed_64()
    against: dict[str, list[float]] = {"random": [], "without swaps": []}
    cores = int(result.environment["cores"])
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        _small(result, pool, arguments.first_instance, arguments.instances, arguments.small_evaluations)
        for name in _MODELS:
            for asynchronous in (False, True):
                workflow = step(model(name), arguments.sequences, 2048.0, 8192.0, asynchronous=asynchronous)
                case = f"{name}, {'asynchronous' if asynchronous else 'synchronous'}"
                seconds = _mixed(result, pool, case, cluster, workflow, arguments)
                for other in against:
                    against[other].append(ratio_of_medians(seconds[other], seconds["search"])["ratio"])
    for other, ratios in against.items():
        short = other.replace(" ", "_")
        result.target(f"{short}_over_search_smallest_case", min(ratios), ">", 1.0)
        result.target(f"{short}_over_search_geometric_mean", statistics.geometric_mean(ratios), ">", 1.0)
    return result


def _instance(evaluations: int, seed: int) -> tuple[float, float | None, int] | None:
    """Cost ratios to the optimum and the placements evaluated for it; None if nothing fits.

    The ratios are of the search and, if it fits, of the plan for equal devices.
    """
    cluster, workflow = small_instance(seed)
    exhaustive = Exhaustive(CostModel(cluster, workflow))
    best = exhaustive.run()
    if not best.feasible:
        return None
    found = search(CostModel(cluster, workflow), evaluations, seed)
    even = uniform_plan(CostModel(cluster, workflow, balanced=False))
    return found.seconds / best.seconds, even.seconds / best.seconds if even.feasible else None, exhaustive.placements


def _small(result: BenchmarkResult, pool: Executor, first: int, wanted: int, evaluations: int) -> None:
    ratios: list[float] = []
    uniform: list[float] = []
    none = looked = 0
    seeds = count(first)
    while len(ratios) < wanted:
        for instance in pool.map(functools.partial(_instance, evaluations), islice(seeds, wanted - len(ratios))):
            if instance is None:
                none += 1
                continue
            ratios.append(instance[0])
            uniform += [] if instance[1] is None else [instance[1]]
            looked += instance[2]
    result.rows.append(
        {
            "case": f"{wanted} random clusters of at most 6 devices",
            "method": "search",
            "evaluations": evaluations,
            "over_optimum": _spread(ratios),
            "optimal": sum(ratio <= 1 + 1e-9 for ratio in ratios),
            "ratios": ratios,
        }
    )
    result.rows.append(
        {
            "case": "the same, for equal devices",
            "method": "uniform",
            "over_optimum": _spread(uniform),
            "does_not_fit": wanted - len(uniform),
            "ratios": uniform,
        }
    )
    result.rows.append({"case": "the same", "method": "exhaustive", "evaluations": looked, "does_not_fit": none})
    result.target("small_instances", len(ratios), ">=", 50)
    result.target("small_worst_over_optimum", max(ratios), "<=", LIMIT)


def _found(method: str, cluster: Cluster, workflow: Workflow, evaluations: int, seed: int) -> HeteroSearchResult:
    return _METHODS[method](CostModel(cluster, workflow), evaluations, seed)


def _mixed(
    result: BenchmarkResult,
    pool: Executor,
    case: str,
    cluster: Cluster,
    workflow: Workflow,
    arguments: argparse.Namespace,
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    best: dict[str, HeteroSearchResult] = {}
    for name in _METHODS:
        one = functools.partial(_found, name, cluster, workflow, arguments.evaluations)
        runs = list(pool.map(one, range(arguments.seeds)))
        seconds[name] = [found.seconds for found in runs]
        best[name] = min(runs, key=lambda found: found.seconds)
    for name, found in best.items():
        row: dict[str, Any] = {"case": case, "method": name, "evaluations": arguments.evaluations}
        row |= {"seconds": _spread(seconds[name]), "plan": _words(found, workflow), "runs": seconds[name]}
        if name != "search":
            row["over_search"] = ratio_of_medians(seconds[name], seconds["search"])
        result.rows.append(row)
    even = uniform_plan(CostModel(cluster, workflow, balanced=False))
    row = {"case": case, "method": "uniform", "plan": _words(even, workflow), "seconds": _spread([even.seconds])}
    median = statistics.median(seconds["search"])
    row["over_search"] = {"ratio": even.seconds / median} | {
        end: even.seconds / of(seconds["search"]) for end, of in (("low", max), ("high", min))
    }
    result.rows.append(row)
    return seconds


def _words(found: HeteroSearchResult, workflow: Workflow) -> str:
    """For instance ``rollout TP4xDP4 + drafter DP8 of 24 | actor PP4xDP5 of 40``."""
    plan = found.plan
    groups = []
    for group, devices in enumerate(plan.groups):
        own = [task for task, of in enumerate(plan.group_of) if of == group]
        names = " + ".join(f"{workflow.tasks[task].name} {plan.placements[task].layout}" for task in own)
        groups.append(f"{names} of {len(devices)}")
    return " | ".join(groups)


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
