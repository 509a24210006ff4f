"""Losses and gradient norms of parallel layouts against one process, over several optimizer steps of one model."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.observe.environment import describe_environment


@dataclass(frozen=True)
class LayoutCase:
    """A layout: its processes, fields of Megatron's configuration, and of its gradient buckets."""

    processes: int
    megatron: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    packing: bool = True
    moe: bool = False


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
VP2 = {"virtual_pipeline_model_parallel_size": 2}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

LAYOUTS: dict[str, LayoutCase] = {
    "DP2": LayoutCase(2),
    "DP2+overlap": LayoutCase(2, ddp=OVERLAP),
    "TP2": LayoutCase(2, TP2),
    "TP2+SP": LayoutCase(2, TP2 | SP),
    "PP2": LayoutCase(2, PP2),
    "PP2xVP2": LayoutCase(2, PP2 | VP2),
    "CP2": LayoutCase(2, CP2),
    "CP2, padded": LayoutCase(2, CP2, packing=False),
    "full recompute": LayoutCase(1, FULL_RECOMPUTE),
    "TP2, selective recompute": LayoutCase(2, TP2 | SELECTIVE_RECOMPUTE),
    "TP2xPP2": LayoutCase(4, TP2 | PP2),
    "TP2xCP2+SP": LayoutCase(4, TP2 | CP2 | SP),
    "PP2xVP2xDP2+overlap": LayoutCase(4, PP2 | VP2, OVERLAP),
    "TP2xPP2xDP2": LayoutCase(8, TP2 | PP2),
    "EP2": LayoutCase(2, EP2, moe=True),
    "EP2xETP1xTP2": LayoutCase(2, EP2 | TP2 | SP | {"expert_tensor_parallel_size": 1}, moe=True),
    "EP2xTP2": LayoutCase(4, EP2 | TP2 | SP, moe=True),
    "EP2xTP2xPP2": LayoutCase(8, EP2 | TP2 | SP | PP2, moe=True),
}
"""Dense cases against a dense model in one process, the others against a mixture of experts in one process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which ones")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one layout")


def _run(name: str, case: LayoutCase, model: Path, steps: int, timeout_s: float, out: Path) -> dict[str, list[float]]:
    options = json.dumps({"megatron": case.megatron, "ddp": case.ddp, "packing": case.packing})
    run_worker(f"layout {name}", "layout", [str(model), options, str(steps), str(out)], case.processes, timeout_s)
    found: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _difference(found: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per layout: the largest relative difference of loss and gradient norm of any step."""
    result = BenchmarkResult(environment=describe_environment(), name="layouts")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        references: dict[bool, dict[str, list[float]]] = {}
        for name in arguments.layouts:
            case = LAYOUTS[name]
            model = Path(folder, "moe" if case.moe else "dense")
            if case.moe not in references:
                write_tiny_model("qwen3-moe" if case.moe else "qwen2-tied", model, num_hidden_layers=4)
                alone = LayoutCase(1, moe=case.moe)
                references[case.moe] = _run("one process", alone, model, arguments.steps, arguments.timeout, out)
            found = _run(name, case, model, arguments.steps, arguments.timeout, out)
            loss = _difference(found["loss"], references[case.moe]["loss"])
            grad_norm = _difference(found["grad_norm"], references[case.moe]["grad_norm"])
            result.rows.append(
                {"layout": name, "processes": case.processes, "loss": loss, "grad_norm": grad_norm, "values": found}
            )
            result.target(name, max(loss, grad_norm), "<=", 2e-5)
    return result
