"""The actor's memory in `tlt plan` against Megatron-Core's own modules, for every shipped config for GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.loader import load_config
from megatron_tlt.planning.actor_memory import layer_activations, stage_memory
from megatron_tlt.planning.job import Job, job_of
from tests.helpers.launch import REPOSITORY, run_python

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "workers" / "meta_runs.py"
CONFIGS = sorted(path for path in (REPOSITORY / "launch").glob("*g.yaml"))
NEAR = 0.15


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("meta") / "rows.json"
    run_python(WORKER, [str(out), *map(str, CONFIGS)], timeout_s=300)
    found: dict[str, list[dict[str, Any]]] = json.loads(out.read_text())
    return found


def unfused(path: Path) -> Job:
    """With Megatron-Core's own layers and activations, as they are built on a CPU."""
    job = job_of(load_config(path, check_libraries=False))
    return replace(job, actor=replace(job.actor, fused=False, fused_activation=False))


def far(found: list[dict[str, Any]], job: Job) -> dict[str, float]:
    """What differs by more than 15 %, as planned over built."""
    ratios: dict[str, float] = {}
    for number, (built, planned) in enumerate(zip(found, stage_memory(job), strict=True)):
        ratios[f"weights of stage {number}"] = planned.weights / built["weights"]
        ratios[f"gradients of stage {number}"] = planned.gradients / built["gradients"]
    if "kept" in found[0]:
        one = layer_activations(job.model, job.actor)
        # both norms without the normalized values, which torch's own norm keeps on a CPU alone
        kept = one.input if job.actor.recompute.granularity == "full" else one.kept - 2 * one.input
        ratios["activations of stage 0"] = found[0]["layers"] * kept / found[0]["kept"]
    return {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > NEAR}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_is_built_takes_what_is_planned(path: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    assert far(rows[path.name], unfused(path)) == {}


def test_a_plan_that_forgets_something_is_found(rows: dict[str, list[dict[str, Any]]]) -> None:
    path = next(path for path in CONFIGS if "kept" in rows[path.name][0])
    job = unfused(path)
    half = replace(job, actor=replace(job.actor, gradient_bytes=job.actor.gradient_bytes // 2))
    assert any(name.startswith("gradients") for name in far(rows[path.name], half))
    fewer = replace(job, actor=replace(job.actor, max_tokens=job.actor.max_tokens // 2))
    assert "activations of stage 0" in far(rows[path.name], fewer)
