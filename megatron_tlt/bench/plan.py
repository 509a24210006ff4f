"""The planner's predictions against real training: memory of every process, and the order of layouts by speed."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.bench.layouts import CP2, FULL_RECOMPUTE, PP2, SP, TP2, VP2
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tiny_models import family_config, write_tiny_model
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.config.layouts import Layout
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.planning.actor_memory import stage_memory
from megatron_tlt.planning.cost import Workload, update_seconds
from megatron_tlt.planning.job import ActorJob, EngineJob, Job, Recompute
from megatron_tlt.planning.machine import CPU, Machine, constants, find_machine
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.optimizer_state import OptimizerMemory

WITHIN = 0.15
# A launch lets glibc keep freed memory, which is faster; this is timed. The memory that training needs is measured in a
# separate run that returns it at once.
_GIVEN_BACK = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
RANK_ORDER = 0.8


@dataclass(frozen=True)
class Shape:
    """A model and its training data: numbers of sequences and tokens; ``rows`` sequences are a micro-batch."""

    sizes: dict[str, int]
    sequences: int
    tokens: int
    rows: int = 1


LARGE = Shape(
    {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
    },
    sequences=8,
    tokens=256,
)
"""103 M parameters."""
QUICKSTART = Shape(
    {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 512,
    },
    sequences=24,
    tokens=340,
    rows=6,
)
"""The model of launch/quickstart-deterministic.yaml, with micro-batches of the same size."""


@dataclass(frozen=True)
class PlanCase:
    """A layout of ``processes`` for a shape."""

    shape: Shape
    megatron: dict[str, Any] = field(default_factory=dict)
    processes: int = 8


TP4, TP8 = ({"tensor_model_parallel_size": size} for size in (4, 8))
PP4, PP8 = ({"pipeline_model_parallel_size": size} for size in (4, 8))
CASES: dict[str, PlanCase] = {
    "quickstart, DP2": PlanCase(QUICKSTART, processes=2),
    "DP8": PlanCase(LARGE),
    "TP2xDP4": PlanCase(LARGE, TP2),
    "TP4xDP2+SP": PlanCase(LARGE, TP4 | SP),
    "TP8+SP": PlanCase(LARGE, TP8 | SP),
    "PP2xDP4": PlanCase(LARGE, PP2),
    "PP4xDP2": PlanCase(LARGE, PP4),
    "PP8": PlanCase(LARGE, PP8),
    "TP2xPP2xDP2": PlanCase(LARGE, TP2 | PP2),
    "TP2xPP2xVP2xDP2": PlanCase(LARGE, TP2 | PP2 | VP2),
    "CP2xDP4": PlanCase(LARGE, CP2),
    "TP2xDP4, full recompute": PlanCase(LARGE, TP2 | FULL_RECOMPUTE),
    "PP4xDP2, full recompute": PlanCase(LARGE, PP4 | FULL_RECOMPUTE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which ones")
    parser.add_argument("--steps", type=int, default=2, help="timed optimizer steps, after an untimed one")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds of all cases, after one for memory")
    parser.add_argument("--devices", default=CPU, help="a profile of this machine, or its assumed figures")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one case")


def job_of_case(case: PlanCase) -> Job:
    """The planner's input for a case."""
    shape, given = case.shape, case.megatron
    model = ModelSize.of(family_config("qwen2", tie_word_embeddings=True, **shape.sizes))
    actor = ActorJob(
        layout=Layout.read(given, case.processes),
        bf16=False,
        fused=False,
        recompute=Recompute(given.get("recompute_granularity")),
        max_tokens=shape.rows * shape.tokens,
        chunk_tokens=4096,
        optimizer=OptimizerMemory(8),
        gradient_bytes=4,
    )
    engine = EngineJob(1, False, 4, 4, 0.9, 1, 1, cache_tokens=1)
    return Job(model, actor, engine, None, False, case.processes, 1, shape.tokens - 1, shape.sequences, 1, 0.0)


def predicted_bytes(job: Job) -> list[float]:
    """Predicted bytes of each rank, in rank order."""
    stages = stage_memory(job)
    # gradients are reduced when all activations are freed
    peaks = [stage.states + max(stage.activations + stage.logits, stage.reduced) for stage in stages]
    own = [peak + constants()["memory"]["process"] for peak in peaks]
    each = job.world // len(stages)
    return [own[rank // each] for rank in range(job.world)]


def predicted_seconds(case: PlanCase, job: Job, machine: Machine) -> float:
    shape = case.shape
    return update_seconds(job, machine, Workload(shape.sequences, shape.tokens, shape.tokens))


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per case; seconds are the median over all rounds, memory is that of the process with the largest error."""
    result = BenchmarkResult(environment=describe_environment(), name="plan")
    machine = find_machine(arguments.devices)
    result.environment["planned_for"] = f"{machine.name}: {machine.source}"
    peaks: dict[str, list[int]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in arguments.cases}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.cases:
            peaks[name] = _measured(name, Path(folder), 1, arguments.timeout, _GIVEN_BACK)["peaks"]
        for _ in range(arguments.rounds):
            for name in arguments.cases:
                seconds[name] += _measured(name, Path(folder), arguments.steps, arguments.timeout)["seconds"]
    for name in arguments.cases:
        result.rows.append(_row(name, CASES[name], machine, peaks[name], seconds[name]))
        result.target(f"memory of {name}, off by", result.rows[-1]["off_by"], "<=", WITHIN)
    large = [row for row in result.rows if CASES[row["case"]].shape is LARGE]
    if len(large) > 1:
        order = spearman([row["predicted_s"] for row in large], [row["measured_s"] for row in large])
        result.target(f"rank order of step times over {len(large)} layouts", order, ">=", RANK_ORDER)
    return result


def _measured(
    name: str, folder: Path, steps: int, timeout_s: float, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Peaks of each rank and seconds of each timed step of one run."""
    case = CASES[name]
    shape = case.shape
    model = folder / ("large" if shape is LARGE else "quickstart")
    if not model.is_dir():
        write_tiny_model("qwen2-tied", model, **shape.sizes)
    values = {
        "model": str(model),
        "actor": {"megatron": case.megatron, "max_tokens_per_micro_batch": shape.rows * (shape.tokens + 1)},
        "sequences": shape.sequences,
        "tokens": shape.tokens,
        "vocab": shape.sizes["vocab_size"],
        "steps": steps,
    }
    out = folder / "out.json"
    run_worker(f"plan {name}", "plan", [json.dumps(values), str(out)], case.processes, timeout_s, environment)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _row(name: str, case: PlanCase, machine: Machine, peaks: list[int], seconds: list[float]) -> dict[str, Any]:
    job = job_of_case(case)
    predicted = predicted_bytes(job)
    off = [abs(a - b) / b for a, b in zip(predicted, peaks, strict=True)]
    worst = off.index(max(off))
    return {
        "case": name,
        "processes": case.processes,
        "predicted_mib": predicted[worst] / 2**20,
        "measured_mib": peaks[worst] / 2**20,
        "off_by": off[worst],
        "predicted_s": predicted_seconds(case, job, machine),
        "measured_s": statistics.median(seconds),
        "seconds": seconds,
        "all_predicted_mib": [size / 2**20 for size in predicted],
        "all_measured_mib": [size / 2**20 for size in peaks],
    }


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)
