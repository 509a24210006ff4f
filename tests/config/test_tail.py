"""What tail batching and adaptive limits go together with."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_tlt.config.algorithm_checks import algorithm_violations
from megatron_tlt.config.schedule import schedule_violations
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.tail import tail_violations
from megatron_tlt.rollout.engines import engine_problems

BASE: dict[str, Any] = {"model": {"path": "m"}, "tasks": [{"name": "gcd"}], "launcher": {"nproc_per_node": 2}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"tail": {}}, []),
        ({"tail": None, "observe": {"recording": True}}, []),
        ({"tail": {"eta_prompts": 1}}, ["tail: found eta_prompts and eta_responses of 1"]),
        (
            {"tail": {}, "algorithm": {"dynamic_sampling": {"enabled": True}}},
            ["algorithm.dynamic_sampling.enabled: found true"],
        ),
        ({"tail": {}, "trainer": {"curriculum": {}}}, ["trainer.curriculum: found a section"]),
        ({"tail": {}, "observe": {"recording": True}}, ["observe.recording: found true"]),
        (
            {"tail": {}, "tasks": [{"name": "products", "environment": {"name": "calculator"}}]},
            ["tasks.environment: products has one"],
        ),
        ({"tail": {}, "run": {"deterministic": True}}, ["run.deterministic: found true; 2 engines"]),
        (
            {"tail": {"deferred": "continue"}},
            ["tail.deferred: found continue; its responses have tokens of earlier policies"],
        ),
        ({"tail": {"deferred": "continue"}, "algorithm": {"correction": {"bypass": True}}}, []),
        (
            {
                "tail": {"deferred": "continue"},
                "algorithm": {"correction": {"weights": "token"}},
                "rollout": {"router_replay": "ids"},
            },
            ["tail.deferred: found continue; rollout.router_replay: found ids"],
        ),
        (
            {"tail": {"race": "time"}, "run": {"deterministic": True}, "rollout": {"tensor_parallel_size": 2}},
            ["tail.race: found time; what is kept", "tail.race: found time; the 2 ranks of an engine"],
        ),
        ({"tail": {"max_staleness": 3}}, ["tail.max_staleness: found 3; deferred: resample has tokens of one policy"]),
        ({"tail": {}, "run": {"deterministic": True}, "rollout": {"tensor_parallel_size": 2}}, []),
    ],
)
def test_what_contradicts_tail_batching_is_named(sections: dict[str, Any], said: list[str]) -> None:
    found = list(tail_violations(TltConfig.model_validate({**BASE, **sections})))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"tail": {}}, ["schedule: found a section beside tail"]),
        ({"schedule": {"kind": "one_step_off"}}, []),
        (
            {"schedule": {"kind": "one_step_off", "eta_prompts": 2}},
            ["schedule.eta_prompts: found 2; kind: one_step_off always begins one step"],
        ),
        ({"algorithm": {}}, ["schedule.kind: found partial; its responses have tokens of earlier policies"]),
        ({"trainer": {"curriculum": {}}}, ["trainer.curriculum: found a section"]),
        ({"rollout": {"router_replay": "ids"}}, ["schedule.kind: found partial; rollout.router_replay: found ids"]),
        ({"run": {"deterministic": True}}, ["run.deterministic: found true; 2 engines"]),
    ],
)
def test_what_contradicts_a_schedule_is_named(sections: dict[str, Any], said: list[str]) -> None:
    correction = {"algorithm": {"correction": {"weights": "token"}}, "schedule": {"kind": "partial"}}
    config = TltConfig.model_validate({**BASE, **correction, **sections})
    found = list(schedule_violations(config))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_an_engine_that_cannot_end_requests_is_refused() -> None:
    rollout = {"engine": "replay", "engine_arguments": {"path": "r"}}
    sections = {"speculation": {"enabled": False}, "reshard": {"method": "none"}, "tail": {}}
    found = engine_problems(TltConfig.model_validate({**BASE, "rollout": rollout, **sections}))
    assert found == ["tail: found a section; engine replay cannot end requests early; allowed: null"]


def test_limits_by_measured_times_are_not_for_deterministic_runs() -> None:
    sections = {"rewards": {"adaptive_timeout": True}, "run": {"deterministic": True}}
    assert list(algorithm_violations(TltConfig.model_validate({**BASE, **sections}))) == [
        "rewards.adaptive_timeout: found true; verdicts then depend on measured times; allowed with "
        "run.deterministic: false"
    ]
