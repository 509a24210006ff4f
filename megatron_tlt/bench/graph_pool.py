"""CUDA graphs of a set of strategies: one alone, all naively, all bucketed; modelled, and measured with a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_tlt.bench.graph_memory import (
    GB,
    ModelDimensions,
    PublishedSetting,
    comparison_plans,
    load_published,
)
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.errors import TltError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.versions import installed_versions
from megatron_tlt.rollout.vllm_graphs import engine_arguments
from megatron_tlt.rollout.vllm_versions import check_version
from megatron_tlt.speculation.graph_pool import GraphPlan, capture_sizes
from megatron_tlt.speculation.strategy import Strategy

WORKER = Path(__file__).parent / "workers" / "graph_memory.py"
MEASURED_FOR_S = 900
# tolerance around the published figure that was not used in the fit
PREDICTION_WITHIN = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies",
        type=Strategy.parse,
        nargs="+",
        default=[Strategy("eagle", k) for k in (7, 5, 3, 1)],
        help="chains as vLLM runs them, in addition to the published strategies",
    )
    parser.add_argument("--starts", type=int, nargs="+", default=[1, 2, 5, 21], help="first batch of each bucket")
    parser.add_argument("--threshold", type=int, default=32, help="largest batch that speculates")
    parser.add_argument("--max-batch", type=int, default=256, help="largest batch with a graph")
    parser.add_argument(
        "--measure", choices=("auto", "never"), default="auto", help="capture the chains' plans if there is a GPU"
    )


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Rows for Llama-3-8B, per rank at TP4: the published strategies, then chains as vLLM runs them.

    ``basis`` is the origin of a modelled figure: fitted to the published one of its row, or predicted. So the ratio in
    the published setting is mostly the published ratio; the chains' is a prediction. Measured figures are of one GPU at
    TP1, compared with ``modelled_tp1_gb``; vLLM shares target graphs of equal verify size in the naive plan too.

    Raises:
        ValueError: strategies, starts and threshold are inconsistent.
    """
    published = load_published()
    sizes = capture_sizes(arguments.max_batch)
    chains = comparison_plans(tuple(arguments.strategies), tuple(arguments.starts), arguments.threshold, sizes)
    result = BenchmarkResult(environment=describe_environment(), name="graph-pool")
    why_not = _unmeasurable() if arguments.measure == "auto" else "not asked for"
    single = replace(published.model, tensor_parallel_size=1)
    ratios = {}
    for setting, plans in (("published", published.plans), ("chains", chains)):
        rows = {kind: _row(setting, kind, plan, published) for kind, plan in plans.items()}
        ratios[setting] = rows["naive"]["modelled_gb"] / rows["bucketed"]["modelled_gb"]
        for kind, row in rows.items():
            if setting == "chains":
                row["modelled_tp1_gb"] = published.memory.plan_bytes(plans[kind], single) / GB
                unmeasured = {"measured_gb": None, "not_measured": why_not}
                row |= unmeasured if why_not else _measure(plans[kind], published.model)
            result.rows.append(row)
    naive = published.memory.plan_bytes(published.plans["naive"], published.model) / GB
    off = abs(naive / published.gigabytes["naive"] - 1)
    result.target("naive_over_bucketed_modelled_published_strategies", ratios["published"], ">=", 2.8)
    result.target("naive_over_bucketed_modelled_chains", ratios["chains"], ">=", 2.8)
    result.target("prediction_of_published_naive_relative_error", off, "<=", PREDICTION_WITHIN)
    measured = {row["plan"]: row["measured_gb"] for row in result.rows if row.get("measured_gb")}
    if {"naive", "bucketed"} <= set(measured):
        result.target("naive_over_bucketed_measured_chains", measured["naive"] / measured["bucketed"], ">=", 2.8)
    return result


def _row(setting: str, kind: str, plan: GraphPlan, published: PublishedSetting) -> dict[str, Any]:
    known = published.gigabytes[kind] if setting == "published" else None
    return {
        "setting": setting,
        "plan": kind,
        "strategies": [strategy.name for strategy in plan.strategies],
        "graphs": plan.count(),
        "target": plan.count("target"),
        "plain": sum(graph.is_plain for graph in plan.graphs),
        "draft": plan.count("draft_prefill") + plan.count("draft_decode"),
        "modelled_gb": published.memory.plan_bytes(plan, published.model) / GB,
        "published_gb": known,
        "basis": "fitted" if known is not None and kind in published.fitted_on else "predicted",
    }


def _unmeasurable() -> str:
    """Why nothing can be captured here; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    try:
        check_version(installed_versions()["vllm"])
    except TltError as error:
        return str(error)
    return ""


def _measure(plan: GraphPlan, model: ModelDimensions) -> dict[str, Any]:
    """Captures a plan in an engine of its own process; a failure is noted in the row."""
    most = max(graph.batch for graph in plan.graphs)
    tokens = max(8192, *(graph.num_tokens for graph in plan.graphs))
    job = {
        "model": asdict(model),
        "arguments": {"max_num_seqs": most, "max_num_batched_tokens": tokens} | engine_arguments(plan, most, tokens),
        "graphs": [[graph.kind, graph.batch, graph.tokens_per_request, _name(graph.owner)] for graph in plan.graphs],
        "kind": plan.kind,
        "strategies": [strategy.name for strategy in plan.strategies],
    }
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "job.json", Path(folder) / "out.json"
        given.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, str(WORKER), str(given), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURED_FOR_S)
        except subprocess.TimeoutExpired:
            return {"measured_gb": None, "not_measured": f"took more than {MEASURED_FOR_S} s"}
        if done.returncode or not out.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"measured_gb": None, "not_measured": f"status {done.returncode}: {last[:300]}"}
        found = json.loads(out.read_text(encoding="utf-8"))
    return {"measured_gb": found["bytes"] / GB, "captured": found["captured"], "capture_s": found["seconds"]}


def _name(strategy: Strategy | None) -> str | None:
    return None if strategy is None else strategy.name
