"""The ledger of a run's memory against the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.shipped import LAUNCH
from megatron_tlt.planning.memory import MemoryPlan, PhaseMemory
from megatron_tlt.trainer.memory_ledger import MemoryLedger

GIB = float(2**30)


def phase(name: str, stage: int, gib: float) -> PhaseMemory:
    return PhaseMemory(name, stage, {"weights": gib * GIB})


PLAN = MemoryPlan(
    80 * GIB,
    (
        phase("start, policy", 0, 30),
        phase("start, engine", 0, 60),
        phase("rollout", 0, 60),
        phase("log-probs", 0, 40),
        phase("log-probs", 1, 50),
        phase("update", 0, 55),
        phase("drafter, in the bubble", 0, 64),
        phase("reshard", 0, 48),
    ),
    cache_tokens=1e6,
    longest=1000,
)


def test_a_phase_is_that_of_the_fullest_stage_and_of_what_it_contains() -> None:
    ledger = MemoryLedger(PLAN)
    assert ledger.at_start.endswith("start 60.0, rollout 64.0, log_probs 50.0, update 55.0, reshard 48.0")
    measured = {"rollout": 66 * GIB, "log_probs": 25 * GIB, "drafter": 3 * GIB}
    assert ledger.after_step(measured).endswith(
        "(GiB of 80.0): rollout 66.0 (64.0), log_probs 25.0 (50.0), drafter 3.0"
    )
    assert ledger.ratios(measured) == pytest.approx({"rollout": 66 / 64, "log_probs": 0.5})


def test_a_shipped_config_has_one_and_an_unreadable_model_none(tmp_path: Path) -> None:
    config = load_config(LAUNCH / "qwen2.5-7b-1n8g.yaml")
    ledger = MemoryLedger.of_run(config, 80 << 30)
    assert ledger is not None and "start 6" in ledger.at_start
    lost = config.model.model_copy(update={"path": tmp_path / "none", "architecture": None})
    assert MemoryLedger.of_run(config.model_copy(update={"model": lost}), 80 << 30) is None
