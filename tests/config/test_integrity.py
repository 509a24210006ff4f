"""The section ``integrity``."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_tlt.config.identity import identifies_run
from megatron_tlt.config.integrity import integrity_violations
from megatron_tlt.config.schema import TltConfig

TP2, CP2 = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}


def config(integrity: dict[str, Any], processes: int = 2, megatron: dict[str, Any] | None = None) -> TltConfig:
    return TltConfig.model_validate(
        {
            "model": {"path": "m"},
            "tasks": [{"name": "gcd"}],
            "launcher": {"nproc_per_node": processes},
            "actor": {"megatron": megatron or {}},
            "integrity": integrity,
        }
    )


@pytest.mark.parametrize(
    ("processes", "megatron", "refused"),
    [(1, {}, True), (2, {}, False), (2, TP2, True), (4, TP2, False), (2, CP2, False)],
)
def test_one_replica_has_nothing_to_compare(processes: int, megatron: dict[str, Any], refused: bool) -> None:
    lines = list(integrity_violations(config({"replicas_every": 5}, processes, megatron)))
    assert [line.partition(":")[0] for line in lines] == ["integrity.replicas_every"] * refused
    assert all("found 5" in line and "one replica" in line and "allowed: 0, or" in line for line in lines)
    assert list(integrity_violations(config({}, processes, megatron))) == []


def test_it_is_off_unless_asked_for_and_does_not_identify_a_run() -> None:
    found = config({}).integrity
    assert (found.replicas_every, found.on_difference, found.checkpoints) == (0, "stop", False)
    assert not identifies_run("integrity.replicas_every") and not identifies_run("integrity.checkpoints")


@pytest.mark.parametrize("wrong", [{"replicas_every": -1}, {"on_difference": "ignore"}, {"replicas": 1}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(wrong)
