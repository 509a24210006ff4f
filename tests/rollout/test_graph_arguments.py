"""What an engine is told of its CUDA graphs and draft lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import AdaptiveConfig, SpeculationConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.adaptive import pool_of
from megatron_tlt.rollout.vllm_graphs import engine_arguments, every_length
from megatron_tlt.rollout.vllm_setup import engine_args

MAX_SEQS, MAX_TOKENS = 48, 4096


@pytest.fixture
def without_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)


LIMITS = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_TOKENS}
SECOND = RolloutConfig(max_prompt_tokens=16, max_response_tokens=16, model_runner="v2", vllm=LIMITS)


@pytest.mark.parametrize(
    ("drafter", "method", "mode"),
    [("eagle", "eagle", "FULL_DECODE_ONLY"), ("suffix", "ngram", "FULL_AND_PIECEWISE")],
)
def test_an_engine_on_the_second_runner_gets_the_plans_graphs(
    folders: tuple[Path, Path], without_a_cpu: None, drafter: str, method: str, mode: str
) -> None:
    model, head = folders
    path = head if drafter == "eagle" else None
    speculation = SpeculationConfig(drafter=drafter, path=path, num_speculative_tokens=3, adaptive=AdaptiveConfig())
    found = engine_args(model, SECOND, speculation, seed=1)
    plan = pool_of(speculation, MAX_SEQS, MAX_TOKENS)
    assert found["compilation_config"] == engine_arguments(plan, MAX_SEQS, MAX_TOKENS)["compilation_config"]
    assert found["compilation_config"]["cudagraph_mode"] == mode
    speculative = found["speculative_config"]
    assert speculative["num_speculative_tokens_per_batch_size"] == every_length(plan, MAX_SEQS)
    assert speculative["method"] == method and speculative["num_speculative_tokens"] == 3


@pytest.mark.parametrize(
    "own", [{"enforce_eager": True}, {"cudagraph_capture_sizes": [4]}, {"compilation_config": {"mode": 0}}], ids=str
)
def test_with_a_users_own_graphs_the_scheduler_still_has_every_length(
    folders: tuple[Path, Path], without_a_cpu: None, own: dict[str, Any]
) -> None:
    """Without a schedule the scheduler reserves the most drafts in each step, whatever the strategy."""
    model, head = folders
    rollout = SECOND.model_copy(update={"vllm": LIMITS | own, "async_scheduling": True})
    adaptive = AdaptiveConfig(strategies=["off", "eagle-1", "eagle-3"])
    speculation = SpeculationConfig(drafter="eagle", path=head, num_speculative_tokens=3, adaptive=adaptive)
    found = engine_args(model, rollout, speculation, seed=1)
    schedule = found["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert {drafts for *_, drafts in schedule} == {0, 1, 3}
    assert found.get("compilation_config") == own.get("compilation_config")


def test_an_adaptive_engine_has_the_graphs_of_its_strategies_on_a_gpu(
    folders: tuple[Path, Path], without_a_cpu: None
) -> None:
    """Graphs at the plan's numbers of tokens."""
    model, head = folders
    adaptive = AdaptiveConfig(strategies=["off", "eagle-1", "eagle-7"], threshold=6, hysteresis=2)
    speculation = SpeculationConfig(drafter="eagle", path=head, num_speculative_tokens=7, adaptive=adaptive)
    rollout = RolloutConfig(max_prompt_tokens=16, max_response_tokens=16, vllm={"max_num_seqs": 24})
    found = engine_args(model, rollout, speculation, seed=1)
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (24, 8192)
    plain, one, seven = {1, 2, 4, 8, 16, 24}, {2, 4, 8, 16}, {8, 16, 32, 64}
    graphs = found["compilation_config"]
    assert graphs == {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": sorted(plain | one | seven)}
    asked = rollout.model_copy(update={"cuda_graphs": "piecewise"})
    assert engine_args(model, asked, speculation, seed=1)["compilation_config"] == {
        **graphs,
        "cudagraph_mode": "PIECEWISE",
    }

    small = rollout.model_copy(update={"vllm": {"max_num_seqs": 24, "max_num_batched_tokens": 40}})
    sizes = engine_args(model, small, speculation, seed=1)["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == [1, 2, 4, 8, 16, 24, 32]
    for own in ({"enforce_eager": True}, {"cudagraph_capture_sizes": [1]}):
        theirs = rollout.model_copy(update={"vllm": own})
        assert "compilation_config" not in engine_args(model, theirs, speculation, seed=1)
    without = SpeculationConfig(enabled=False)
    assert "compilation_config" not in engine_args(model, rollout, without, seed=1)
    assert engine_args(model, asked, without, seed=1)["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}


def test_the_kind_of_graphs_is_said_once_and_not_on_a_cpu(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="cuda_graphs is full, but vllm has enforce_eager; allowed: one of them"):
        RolloutConfig(cuda_graphs="full", vllm={"enforce_eager": True})
    with pytest.raises(ConfigError, match="cuda_graphs is full; on a CPU only auto"):
        engine_args(folders[0], RolloutConfig(cuda_graphs="full"), SpeculationConfig(enabled=False), seed=1)
