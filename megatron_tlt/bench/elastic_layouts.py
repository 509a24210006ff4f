"""Training on the same responses under many layouts: whether ``elastic.strict`` keeps every bit."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.bench.workers import measure_in_worker

STAGES: dict[int, dict[str, int]] = {
    1: {},
    2: {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3},
    3: {
        "pipeline_model_parallel_size": 3,
        "num_layers_in_first_pipeline_stage": 2,
        "num_layers_in_last_pipeline_stage": 1,
    },
    4: {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 2},
}
"""Options of ``actor.megatron`` for five layers on so many stages."""
LOGICAL_SHARDS = 4
SIZES: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2))
"""Pipeline and data-parallel sizes that are compared."""
_FIRST = SIZES[0]


def layout(shards: int | None, stages: int = 1, **options: int | bool) -> dict[str, Any]:
    """A layout as ``workers.strict`` takes it; ``shards`` None trains without ``elastic.strict``."""
    return {"megatron": {**STAGES[stages], **options}, "logical_shards": shards}


def name_of(stages: int, replicas: int, *, strict: bool = True) -> str:
    return f"{'' if strict else 'plain '}pp{stages} dp{replicas}"


def measure_layouts(batches: int, mini_batches: int, timeout_s: float) -> dict[str, Any]:
    """What ``workers.strict`` reports for every size, strict and plain, by :func:`name_of`.

    Raises:
        RunError: a process failed, or took longer than ``timeout_s``.
    """
    by_processes: dict[int, dict[str, Any]] = defaultdict(dict)
    for stages, replicas in SIZES:
        for strict in (True, False):
            shards = LOGICAL_SHARDS if strict else None
            by_processes[stages * replicas][name_of(stages, replicas, strict=strict)] = layout(shards, stages)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model("qwen2-untied", Path(folder, "model"), num_hidden_layers=5, tie_word_embeddings=False)
        for processes, layouts in sorted(by_processes.items()):
            given = {"model": str(model), "layouts": layouts, "batches": batches, "mini_batches": mini_batches}
            found |= measure_in_worker(f"layouts of {processes} processes", "strict", given, timeout_s, processes)
    return found


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per size: tensors with other bits than one process has, strict and plain, and the time of strict."""
    rows = []
    for stages, replicas in SIZES:
        strict, plain = (found[name_of(stages, replicas, strict=each)] for each in (True, False))
        reference = [found[name_of(*_FIRST, strict=each)]["hashes"] for each in (True, False)]
        rows.append(
            {
                "layout": name_of(stages, replicas),
                "updates": len(strict["updates"]),
                "tensors": len(strict["hashes"]),
                "other bits, strict": _differing(strict["hashes"], reference[0]),
                "other bits, plain": _differing(plain["hashes"], reference[1]),
                "time, strict over plain": min(strict["seconds"][1:]) / min(plain["seconds"][1:]),
            }
        )
    return rows


def _differing(found: Mapping[str, str], reference: Mapping[str, str]) -> int:
    return sum(found[name] != value for name, value in reference.items())


def worst(rows: Sequence[Mapping[str, Any]]) -> int:
    """The most tensors that a strict layout has with other bits."""
    return max(row["other bits, strict"] for row in rows)
