"""Host memory of converting a checkpoint of some gigabytes, both ways, and whether all bits are preserved."""

from __future__ import annotations

import argparse
import json
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tiny_models import family_config
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.observe.environment import describe_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=24, help="24 are 1.1 billion weights, 2.2 GB in bf16")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes to try")
    parser.add_argument("--folder", type=Path, help="working folder (default: the system's temporary folder)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one conversion")


def write_large_model(folder: Path, layers: int) -> WeightMap:
    """Writes a bf16 Llama of random bits, in which any rounding shows. One file per eight layers."""
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers}
    config = family_config("llama", **sizes, num_attention_heads=32, num_key_value_heads=4)
    config.save_pretrained(folder)
    weights = WeightMap(config)
    generator = torch.Generator().manual_seed(0)
    names = list(weights.shapes)
    place: dict[str, str] = {}
    for start in range(0, len(names), 72):
        file = f"model-{start:05d}.safetensors"
        tensors = {}
        for name in names[start : start + 72]:
            bits = torch.randint(-(2**15), 2**15, weights.shapes[name], dtype=torch.int16, generator=generator)
            tensors[name] = bits.view(torch.bfloat16)
            place[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}), encoding="utf-8")
    return weights


def _same_bits(a: Path, b: Path, weights: WeightMap) -> bool:
    one, other = SafetensorsFolder(a), SafetensorsFolder(b)
    return all(
        torch.equal(one.read(name).view(torch.int16), other.read(name).view(torch.int16)) for name in weights.shapes
    )


def _measure(what: str, source: Path, target: Path, processes: int, timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        run_worker(what, "conversion", [str(source), str(target), out], processes, timeout_s)
        rows = [json.loads(file.read_text(encoding="utf-8")) for file in Path(out).glob("rank*.json")]
    return {"rise": max(row["rise"] for row in rows), "seconds": max(row["seconds"] for row in rows)}


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per number of processes and direction: the largest rise of anonymous memory of any process.

    It is compared with the size of the largest tensor plus a process's share of the model.
    """
    result = BenchmarkResult(environment=describe_environment(), name="conversion")
    worst, same = 0.0, True
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        weights = write_large_model(root / "hf", arguments.layers)
        total = 2 * weights.num_parameters
        largest = 2 * max(prod(shape) for shape in weights.shapes.values())
        for processes in arguments.processes:
            there, back = root / f"megatron-{processes}", root / f"back-{processes}"
            bound = largest + total / processes
            for name, source, target in (("to Megatron", root / "hf", there), ("to Hugging Face", there, back)):
                row = _measure(f"{name}, {processes} processes", source, target, processes, arguments.timeout)
                worst = max(worst, row["rise"] / bound)
                result.rows.append(
                    {
                        "direction": name,
                        "processes": processes,
                        "model_gib": total / 2**30,
                        "largest_tensor_mib": largest / 2**20,
                        "rise_mib": row["rise"] / 2**20,
                        "bound_mib": bound / 2**20,
                        "seconds": row["seconds"],
                    }
                )
            same = same and _same_bits(root / "hf", back, weights)
    result.target("model_gigabytes", total / 1e9, ">=", 2.0)
    result.target("rise_over_largest_tensor_plus_share", worst, "<=", 1.0)
    result.target("roundtrip_bit_equal", float(same), "==", 1.0)
    return result
