"""Weights from a Megatron layout to vLLM engines: moved directly, or gathered, exported and loaded."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.tiny_models import family_config
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.observe.environment import describe_environment

WORLD = 4
METHODS = ("direct", "export")
# vLLM's CPU attention in bf16 supports heads of 64.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "qwen2",
        {
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
    ),
    "moe": (
        "qwen3_moe",
        {
            "vocab_size": 32000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}


def _sizes(tp: int, pp: int = 1, ep: int = 1) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    return {**sizes, "sequence_parallel": True} if ep > 1 else sizes


@dataclass(frozen=True)
class ReshardCase:
    """An actor's layout and the engines' tensor parallelism."""

    name: str
    engine_tp: int
    megatron: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"


CASES = (
    ReshardCase("TP2xPP2 to TP1 x 4", 1, _sizes(2, 2)),
    ReshardCase("TP2xPP2 to TP2 x 2", 2, _sizes(2, 2)),
    ReshardCase("TP2xPP2 to TP4", 4, _sizes(2, 2)),
    ReshardCase("TP4 to TP1 x 4", 1, _sizes(4)),
    ReshardCase("MoE EP2xTP2 to TP2 x 2", 2, _sizes(2, ep=2), "moe"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="cases to run (default: all)")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of all methods")
    parser.add_argument("--staging-mb", type=float, default=256.0, help="bound of a rank's buffers, in MiB")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one case")


def write_model(folder: Path, name: str) -> WeightMap:
    """A model of normally distributed weights in bf16."""
    family, sizes = MODELS[name]
    config = family_config(family, **sizes, tie_word_embeddings=False)
    config.dtype = torch.bfloat16
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]  # without it vLLM guesses, wrongly for mixtures
    config.save_pretrained(folder)
    weights = WeightMap(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        tensor: torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        for tensor, shape in weights.shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def _measure(case: ReshardCase, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    given = {
        "folder": str(folder),
        "megatron": {**case.megatron, "bf16": True},
        "engine_tp": case.engine_tp,
        "staging_mb": arguments.staging_mb,
        "repeats": arguments.repeats,
    }
    with tempfile.TemporaryDirectory() as out:
        file = Path(out, "out.json")
        run_worker(case.name, "reshard", [json.dumps(given), str(file)], WORLD, arguments.timeout)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Two rows per case; the methods alternate in one process per rank, with and without checksums.

    ``link_mib`` is counted by the kernel on the loopback device that all ranks use, ``staging_mib`` is the largest rise
    of any process's memory.
    """
    result = BenchmarkResult(environment=describe_environment(), name="reshard")
    ratios, verified_ratios, excess, staging = [], [], [], []
    with tempfile.TemporaryDirectory() as root:
        weights = {name: write_model(Path(root, name), name) for name in MODELS}
        for case in CASES:
            if arguments.cases and case.name not in arguments.cases:
                continue
            found = _measure(case, Path(root, case.model), arguments)
            bound = found["lower_bound"]
            for method in METHODS:
                one = found[method]
                result.rows.append(
                    {
                        "case": case.name,
                        "method": method,
                        "parameters_m": weights[case.model].num_parameters / 1e6,
                        "seconds": statistics.median(one["seconds"]),
                        "verified_seconds": statistics.median(one["verified_seconds"]),
                        "all_seconds": one["seconds"],
                        "all_verified_seconds": one["verified_seconds"],
                        "link_mib": one["link_bytes"] / 2**20,
                        "lower_bound_mib": bound / 2**20,
                        "staging_mib": one["rise"] / 2**20,
                        "buffers_mib": one["buffers"] / 2**20 if one["buffers"] else None,
                        "bit_equal": one["bit_equal"],
                    }
                )
            direct, export = found["direct"], found["export"]
            ratios.append(ratio_of_medians(export["seconds"], direct["seconds"]))
            verified_ratios.append(ratio_of_medians(export["verified_seconds"], direct["verified_seconds"]))
            result.rows[-2]["export_over_direct"] = ratios[-1]
            result.rows[-2]["export_over_direct_verified"] = verified_ratios[-1]
            excess.append(direct["link_bytes"] / bound)
            staging.append(max(direct["buffers"], direct["rise"]) / 2**20 / arguments.staging_mb)
    result.target("model_parameters_m", min(w.num_parameters for w in weights.values()) / 1e6, ">=", 100.0)
    result.target("bytes_over_lower_bound", max(excess), "<=", 1.05)
    result.target("export_over_direct", min(ratio["ratio"] for ratio in ratios), ">=", 3.0)
    result.target("export_over_direct_verified", min(ratio["ratio"] for ratio in verified_ratios), ">=", 3.0)
    result.target("staging_over_its_bound", max(staging), "<=", 1.0)
    result.target("bit_equal", float(all(row["bit_equal"] for row in result.rows)), "==", 1.0)
    return result
