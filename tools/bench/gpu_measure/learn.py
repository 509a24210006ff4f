"""A real policy with its trained head: ``tlt bench real`` on SmolLM2-135M, after its supervised warm-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench.gpu_measure.environment import repository_root
from tools.bench.gpu_measure.measurement import Measurement, Settings

if TYPE_CHECKING:
    from megatron_tlt.bench.result import BenchmarkResult
    from tools.bench.gpu_measure.child import Job
    from tools.bench.gpu_measure.record import Rows

ALONE = ["launcher.nproc_per_node=1", "spot=null"]
"""One GPU has one rank."""


def sizes(settings: Settings) -> dict[str, Any]:
    """The launch config with its overrides, and arguments of ``tlt bench real``; a rehearsal has the quickstart."""
    if settings.small:
        overrides = ["model.recipe.supervised.num_steps=20", "rollout.max_response_tokens=48"]
        arguments = "--batches 2 --uniform --repeats 1 --pairs 1 --rollouts 1 --requests 8 --warm-problems 48"
        arguments += " --warm-steps 4 --warm-threads 1"
        return {"config": "launch/quickstart-cpu.yaml", "set": [*ALONE, *overrides], "arguments": arguments}
    vllm: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 32}
    # several engines in one process: vLLM allows sleep mode to one alone, and none may take all memory
    vllm |= {"enable_sleep_mode": False, "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.1}
    arguments = "--batches 4 8 1 16 --uniform 8 --repeats 1 --pairs 10 --rollouts 2 --minutes 4"
    arguments += f" --warm-threads {os.cpu_count()}"
    overrides = [f"rollout.vllm={json.dumps(vllm)}"]
    return {"config": "launch/smollm2-135m-cpu.yaml", "set": [*ALONE, *overrides], "arguments": arguments}


def measurements(settings: Settings) -> list[Measurement]:
    """The model is cached under ``runs/models``; the benchmark keeps each finished batch in DIR."""
    own = sizes(settings)
    return [
        Measurement("model", "learn:build_model", own, expected_s=240),
        Measurement("real", "learn:measure_real", own, expected_s=300),
    ]


def build_model(job: Job) -> None:
    """The recipe's model, on the device; nothing where the cache has it."""
    import time

    from megatron_tlt.config.loader import load_config
    from megatron_tlt.models.recipe import recipe_folder
    from megatron_tlt.trainer.supervised import build_model_of_recipe

    config = load_config(job.given["config"], job.given["set"])
    began = time.perf_counter()
    build_model_of_recipe(config)
    job.emit(seconds=time.perf_counter() - began, recipe=recipe_folder(config).name)


def measure_real(job: Job) -> None:
    """Rows and targets of ``tlt bench real``; a call that is cut off leaves its finished batches to the next."""
    from megatron_tlt.errors import RunError

    given, number = job.given, 1
    while _is_whole(file := job.out / f"learn-real-{number}.json"):  # each repeat has a file of its own
        number += 1
    command = [sys.executable, "-m", "megatron_tlt", "bench", "real", "--config", given["config"], "--rounds", "0"]
    command += [*given["arguments"].split(), "--json", str(file), "--set", *given["set"]]
    status = subprocess.run(command, cwd=repository_root()).returncode
    if not _is_whole(file):  # the status is 1 where a target is missed too
        raise RunError(f"tlt bench real: status {status}, and batches are missing; run again for these")
    found = json.loads(file.read_text(encoding="utf-8"))
    for row in found["rows"]:
        job.emit(**row)
    job.emit(targets=found["targets"])


def _is_whole(file: Path) -> bool:
    """Whether a result has all of its batches."""
    if not file.is_file():
        return False
    targets = json.loads(file.read_text(encoding="utf-8"))["targets"]
    return not any(name.startswith("batch ") and entry["op"] == "incomplete" for name, entry in targets.items())


def judge(result: BenchmarkResult, rows: Rows) -> None:
    """The benchmark's own targets, of the last repeat."""
    for repeat in rows.get("real", [])[-1:]:
        for name, entry in repeat[-1]["targets"].items():
            result.targets[name] = entry
