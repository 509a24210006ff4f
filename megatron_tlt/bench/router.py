"""Log-probs of rollout and actor in a mixture of experts, without and with the engine's experts in the actor."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.observe.environment import describe_environment

LEAST = 5.0
"""How many times smaller the mismatch is to be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the sampling")
    parser.add_argument("--experts", type=int, default=64, help="experts of a layer, 8 of which are chosen")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--responses", type=int, default=32, help="responses of 96 tokens, per seed")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of engine and actor")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all seeds")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per seed and ``rollout.router_replay``; the targets: the mismatch falls to a fifth, in the worst seed.

    The model is a small Qwen3-MoE with random weights. All rows of a seed are of the same responses.
    """
    result = BenchmarkResult(environment=describe_environment(), name="router")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_tiny_model(
            "qwen3-moe",
            model,
            hidden_size=128,
            num_hidden_layers=arguments.layers,
            num_attention_heads=4,
            head_dim=32,
            num_experts=arguments.experts,
            num_experts_per_tok=8,
            vocab_size=256,
        )
        given: dict[str, Any] = {
            "seeds": arguments.seeds,
            "responses": arguments.responses,
            "dtype": arguments.dtype,
            "experts": arguments.experts,
        }
        out = Path(folder, "out.json")
        run_worker("router", "router", [str(model), json.dumps(given), str(out)], 1, arguments.timeout)
        result.rows = json.loads(out.read_text(encoding="utf-8"))
    for replayed in ("ids", "ids_and_weights"):
        for figure in ("k3_kl", "mean_abs"):
            result.target(f"{figure}, own over {replayed}", _least_ratio(result.rows, replayed, figure), ">=", LEAST)
    return result


def _least_ratio(rows: list[dict[str, Any]], replayed: str, figure: str) -> float:
    found = {(row["seed"], row["experts"]): row[figure] for row in rows}
    return min(value / found[seed, replayed] for (seed, experts), value in found.items() if experts == "own")
