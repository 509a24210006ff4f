"""Time that a save blocks training, synchronous and asynchronous, and losses after resuming under another layout."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.config.schema import ArchitectureConfig, RecipeConfig
from megatron_tlt.models.recipe import write_untrained
from megatron_tlt.observe.environment import describe_environment

VOCABULARY = 1024
ARCHITECTURE = ArchitectureConfig(
    hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="number of saves of each kind")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps after a resume")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the whole benchmark")
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints (default: a temporary folder)")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Rows of saves with stalls in seconds, then one per pair of layouts with the largest relative difference."""
    result = BenchmarkResult(environment=describe_environment(), name="checkpoint")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        model = Path(folder, "model")
        write_untrained(model, ARCHITECTURE, RecipeConfig(), VOCABULARY, 1)
        given = [str(model), str(VOCABULARY), str(arguments.repeats), str(arguments.steps)]
        out = Path(folder, "out.json")
        run_worker("checkpoint", "checkpoint", [*given, str(out)], 2, arguments.timeout)
        found = json.loads(out.read_text(encoding="utf-8"))
    stalls = found["stalls"]
    alone = statistics.median(stalls["steps_alone"])
    taken = {name: [save["stall"] for save in stalls[name]] for name in ("async", "sync")}
    for name, seconds in taken.items():
        steps = [step for save in stalls[name] for step in save["steps"]]
        result.rows.append(
            {
                "case": f"{name} save",
                "stall_s": statistics.median(seconds),
                "whole_s": statistics.median(save["whole"] for save in stalls[name]),
                "step_s": statistics.median(steps) if steps else None,
                "step_alone_s": alone,
                "parameters": stalls["parameters"],
                "megabytes": stalls["bytes"] / 1e6,
                "stalls": seconds,
                "steps": steps,
            }
        )
    ratio = ratio_of_medians(taken["async"], taken["sync"])
    result.rows.append({"case": "async over sync", "ratio": ratio})
    result.target("stall, async over sync", ratio["ratio"], "<=", 0.5)
    for row in found["resumes"]:
        pairs = zip(row["resumed"], row["uninterrupted"], strict=True)
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        name = f"{row['from']} to {row['to']}"
        result.rows.append(
            {"case": name, "loss_difference": difference, "losses": [row["uninterrupted"], row["resumed"]]}
        )
        result.target(f"loss, {name}", difference, "<=", 1e-5)
    return result
