"""Losses and gradient norms of parallel layouts against one process, over some optimizer steps of the same model."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import ArchitectureConfig, RecipeConfig
from megatron_tlt.errors import RunError
from megatron_tlt.models.recipe import write_untrained
from megatron_tlt.observe.benchmark import BenchmarkResult
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.processes import torchrun_command

# name: processes, fields of Megatron's configuration
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "DP2": (2, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2xVP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "TP2xPP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "TP2xPP2xDP2": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which ones")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one layout")


def _run(name: str, model: Path, steps: int, timeout_s: float, out: Path) -> dict[str, list[float]]:
    processes, megatron = LAYOUTS[name]
    arguments = [str(model), json.dumps(megatron), str(steps), str(out)]
    command = torchrun_command("megatron_tlt.bench.workers.layout", arguments, processes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"layout {name}: still running after {timeout_s} s") from error
    if done.returncode:
        raise RunError(f"layout {name}: status {done.returncode}; its log ends: {done.stderr[-2000:]}")
    found: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _difference(found: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per layout: the largest relative difference of loss and gradient norm of any step."""
    result = BenchmarkResult(environment=describe_environment(), name="layouts")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        architecture = ArchitectureConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4)
        write_untrained(model, architecture, RecipeConfig(), 64, 1)
        out = Path(folder, "out.json")
        reference = _run("one process", model, arguments.steps, arguments.timeout, out)
        for name in arguments.layouts:
            if name == "one process":
                continue
            found = _run(name, model, arguments.steps, arguments.timeout, out)
            loss = _difference(found["loss"], reference["loss"])
            grad_norm = _difference(found["grad_norm"], reference["grad_norm"])
            result.rows.append(
                {"layout": name, "processes": LAYOUTS[name][0], "loss": loss, "grad_norm": grad_norm, "values": found}
            )
            result.target(name, max(loss, grad_norm), "<=", 2e-5)
    return result
