"""Every family against transformers: logits in one process and over four, and a round trip of its weights."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tiny_models import TINY_MODELS, write_tiny_model
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.observe.environment import describe_environment

# Each expert of a mixture is whole on one of two tensor-parallel ranks; dense models drop those keys.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP1": (1, {}),
    "TP2xPP2(xEP2)": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=TINY_MODELS, default=list(TINY_MODELS), help="which ones")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one layout")


def measure(root: Path, layout: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """For each model folder below ``root``: ``logits`` (largest difference over largest), ``roundtrip_bit_equal``."""
    processes, megatron = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        run_worker(
            f"families at {layout}", "families", [str(root), json.dumps(megatron), str(out)], processes, timeout_s
        )
        found: dict[str, dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per model and layout; random weights in float32, packed sequences."""
    result = BenchmarkResult(environment=describe_environment(), name="families")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            write_tiny_model(name, Path(folder, name))
        for layout in LAYOUTS:
            for name, row in measure(Path(folder), layout, arguments.timeout).items():
                result.rows.append({"model": name, "family": TINY_MODELS[name][0], "layout": layout, **row})
    result.target("logits", max(row["logits"] for row in result.rows), "<=", 1e-5)
    result.target("roundtrip_bit_equal", float(all(row["roundtrip_bit_equal"] for row in result.rows)), "==", 1.0)
    return result
