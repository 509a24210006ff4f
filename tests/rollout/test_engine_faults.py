"""What an engine does with requests that it cannot serve, or not at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.types import DraftStats, Request, SamplingSpec
from megatron_tlt.rollout.vllm_requests import to_response
from megatron_tlt.rollout.vllm_setup import engine_args
from megatron_tlt.speculation.strategy import StepRecord

from .conftest import ROLLOUT, SPECULATION
from .test_engine import expected_log_probs, mixed_requests

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine


def test_a_request_that_vllm_drops_is_an_error_and_no_shorter_list(engine: VllmEngine) -> None:
    requests = mixed_requests(4)

    def drop(record: StepRecord) -> None:
        state = engine._rollout_state
        if state is not None and "m1" in state.internal_of and record.start > 0:
            engine._llm.abort_request([state.internal_of["m1"]], internal=True)

    with pytest.raises(RunError, match="request m1: vLLM ended it without a response"):
        engine.generate(requests, on_step=drop)
    assert len(engine.generate(requests)) == 4


@pytest.mark.parametrize("reason", ["error", "repetition"])
def test_a_response_that_vllm_cut_off_is_an_error(reason: str) -> None:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

    (request,) = mixed_requests(1)
    log_probs = [{token: Logprob(-1.0)} for token in (1, 2)]
    completion = CompletionOutput(0, "", [1, 2], None, log_probs, finish_reason=reason)
    with pytest.raises(RunError, match=f"request m0: vLLM ended it with '{reason}' after 2 tokens"):
        to_response(request, completion, DraftStats(num_tokens=2), 0.0)


def test_a_temperature_that_vllm_changes_is_refused(engine: VllmEngine) -> None:
    cold = Request("cold", (1, 2, 3), SamplingSpec(temperature=0.005, max_tokens=4), seed=0)
    with pytest.raises(ConfigError, match=r"request cold: temperature 0\.005; allowed: 0, or at least 0\.01"):
        engine.generate([cold])


def test_requests_that_wait_for_blocks_have_the_log_probs_of_their_tokens(
    model_folder: Path, reference: Qwen2ForCausalLM, engine: VllmEngine
) -> None:
    # after the shared one, which owns the process group
    few = ROLLOUT.model_copy(update={"vllm": ROLLOUT.vllm | {"num_gpu_blocks_override": 8}})
    crowded = type(engine)(model_folder, few, SPECULATION, seed=7)
    preempted: list[str] = []
    upstream = crowded._scheduler._preempt_request

    def preempt(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return upstream(request, *rest, **options)

    crowded._scheduler._preempt_request = preempt
    try:
        requests = mixed_requests(12)
        for request, response in zip(requests, crowded.generate(requests), strict=True):
            assert len(response.token_ids) == request.sampling.max_tokens
            expected = expected_log_probs(reference, response, request.sampling)
            assert response.log_probs == pytest.approx(expected, abs=1e-4)
    finally:
        crowded.shutdown()
    assert preempted


def test_a_cache_too_small_for_one_request_names_what_sets_its_size(model_folder: Path, engine: VllmEngine) -> None:
    few = ROLLOUT.model_copy(update={"vllm": ROLLOUT.vllm | {"num_gpu_blocks_override": 2}})
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE, 1 GiB, or rollout"):
        type(engine)(model_folder, few, SPECULATION, seed=7)


@pytest.mark.parametrize("found", ["0.5", "-1", "2G"])
def test_a_cache_size_that_is_no_number_of_gib_is_refused(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", found)
    with pytest.raises(ConfigError, match=f"VLLM_CPU_KVCACHE_SPACE: found '{found}'; allowed: whole GiB"):
        engine_args(model_folder, ROLLOUT, SPECULATION, 0)
