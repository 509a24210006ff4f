"""Resolved configs of earlier releases: what later checks refuse in them does not keep their runs from going on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_tlt.config.loader import compare_resolved, dump_resolved, load_config, load_resolved
from megatron_tlt.config.migrations import MIGRATIONS, VERSION_KEY, migrate
from tests.config.test_loader import violations, write

DRAFTER = ("speculation.drafter=eagle", "drafter.kind=eagle")


def old_file(folder: Path, change: Callable[[dict[str, Any]], object], *overrides: str) -> Path:
    """A resolved config as a release of version 0 wrote it, with what ``change`` sets."""
    config = load_config(write(folder), overrides, check_libraries=False)
    values = yaml.safe_load(dump_resolved(config)) | {VERSION_KEY: 0}
    change(values)
    path = folder / "resolved.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def set_fp16(values: dict[str, Any]) -> None:
    sections = (
        values["actor"]["megatron"],
        values["actor"]["optimizer"],
        values["model"]["recipe"]["supervised"]["optimizer"],
    )
    for section in sections:
        section["fp16"] = True


OTHERS = ["actor.megatron.bf16=true", "actor.optimizer.lr=1e-5", "model.recipe.supervised.optimizer.lr=1e-3"]
FP16 = ["actor.megatron.fp16", "actor.optimizer.fp16", "model.recipe.supervised.optimizer.fp16"]
CASES = {
    "fp16 removed": (set_fp16, []),
    "fp16 set to false": (set_fp16, [*OTHERS, *(f"{key}=false" for key in FP16)]),
    "temperature": (
        lambda values: values["rollout"]["sampling"].update(temperature=0.005),
        ["rollout.sampling.temperature=0.01"],
    ),
    "no files": (
        lambda values: (values["run"].update(deterministic=True), values["drafter"]["buffer"].update(disk_bytes=0)),
        [*DRAFTER, "run.deterministic=true"],
    ),
    "buffer below a response": (
        lambda values: values["drafter"]["buffer"].update(disk_bytes=0, memory_bytes=1000),
        [*DRAFTER],
    ),
    "verifier of generated tasks, not read then": (
        lambda values: [task.update(verifier="math") for task in values["tasks"]],
        [],
    ),
    "spot.least_steps": (
        lambda values: values["spot"].update(least_steps=values["spot"].pop("min_steps")),
        [*DRAFTER, "spot.min_steps=3", "launcher.nproc_per_node=2"],
    ),
    "way of the weights": (lambda values: values["reshard"].update(method="export"), []),
    "staleness of one_step_off, not read then": (
        lambda values: values["schedule"].update(max_staleness=4),
        ["schedule={kind: one_step_off}", "algorithm.correction={weights: token}"],
    ),
    "recipe's micro-batch": (
        lambda values: values["model"]["recipe"]["supervised"].update(max_tokens_per_micro_batch=10),
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_values_are_refused_today_goes_on_with_mended_ones(case: str, tmp_path: Path) -> None:
    change, overrides = CASES[case]
    path = old_file(tmp_path, change, *overrides)
    assert compare_resolved(path, load_config(write(tmp_path), overrides, check_libraries=False)) == []


def test_values_that_had_another_effect_are_read_as_what_they_did(tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        set_fp16(values)
        values["rollout"]["sampling"]["temperature"] = values["evaluation"]["temperature"] = 0.005

    found = load_resolved(old_file(tmp_path, change))
    assert found.rollout.sampling.temperature == found.evaluation.temperature == 0.01
    assert not {"fp16"} & (found.actor.megatron.keys() | found.actor.optimizer.keys())
    values = {"rollout": {"sampling": {"temperature": 0.0}}, "evaluation": {"temperature": 0.7}}
    assert migrate(values, "f") == values
    today = {VERSION_KEY: len(MIGRATIONS), "actor": {"megatron": {"fp16": True}}}
    assert migrate(today, "f") == {"actor": {"megatron": {"fp16": True}}}


def test_an_old_key_in_a_launch_config_is_refused_with_its_new_name(tmp_path: Path) -> None:
    (line,) = violations(write(tmp_path), *DRAFTER, "launcher.nproc_per_node=2", "spot.least_steps=3")
    assert line.endswith("spot.least_steps: this key is now called spot.min_steps")


def test_a_files_verifier_is_what_it_was(tmp_path: Path) -> None:
    file = {"kind": "file", "name": "f", "path": "f.jsonl"}
    path = old_file(tmp_path, lambda values: values.update(tasks=[{**file, "verifier": "math"}, {"name": "gcd"}]))
    assert [task.verifier for task in load_resolved(path).tasks] == ["math", "reasoning_gym"]
    assert (
        compare_resolved(path, load_config(write(tmp_path, tasks=[file, {"name": "gcd"}]), check_libraries=False)) == []
    )
    own = [{**file, "verifier": "mypackage.score"}, {"name": "gcd", "verifier": "math"}]
    changed = compare_resolved(path, load_config(write(tmp_path, tasks=own), check_libraries=False))
    assert changed == ["tasks.0.verifier: 'math' -> 'mypackage.score'", "tasks.1.verifier: 'reasoning_gym' -> 'math'"]


@pytest.mark.parametrize(
    "values", [{}, {"actor": None, "model": {"recipe": None}}, {"rollout": 3, "evaluation": []}, {"tasks": [3]}]
)
def test_what_is_not_there_is_not_migrated(values: dict[str, Any]) -> None:
    assert migrate(values, "f") == values


@pytest.mark.parametrize("loss", ["global_aux_loss", "seq_aux_loss"])
def test_a_refused_router_loss_says_how_its_run_goes_on(loss: str, tmp_path: Path) -> None:
    (line,) = violations(write(tmp_path), f"actor.megatron.moe_router_load_balancing_type={loss}")
    assert "to continue a run that has it, start a new run with model.path: its newest checkpoint" in line
