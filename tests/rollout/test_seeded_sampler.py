"""An engine that samples from seeds and positions: exact distributions, independence of the batch, no generators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.strategy import OFF, Strategy

from .conftest import NGRAM, ROLLOUT, SPECULATION
from .test_engine import mixed_requests, outcome
from .test_lossless import sampled_p_values

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

pytestmark = pytest.mark.parametrize("strategy", [OFF, NGRAM], ids=lambda strategy: strategy.name)


@pytest.fixture(scope="module")
def counting(model_folder: Path, engine: VllmEngine) -> Iterator[VllmEngine]:
    """After the engine that owns the process group."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    rollout = ROLLOUT.model_copy(update={"random_numbers": "counter"})
    counting = VllmEngine(model_folder, rollout, SPECULATION, seed=7)
    yield counting
    counting.shutdown()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_samples_have_the_exact_marginals(
    counting: VllmEngine,
    reference: Qwen2ForCausalLM,
    prompt: tuple[int, ...],
    strategy: Strategy,
    temperature: float,
    top_p: float,
) -> None:
    counting.set_strategy(strategy)
    joint_p, third_p, drafts = sampled_p_values(counting, reference, prompt, temperature, top_p)
    assert min(joint_p, third_p) > 1e-4, f"p-values {joint_p:.3g} (tokens 1 and 2), {third_p:.3g} (token 3)"
    assert (drafts.num_accepted_tokens > 200) == (strategy != OFF)


def test_a_request_does_not_depend_on_the_batch_or_on_other_engines(
    counting: VllmEngine, engine: VllmEngine, strategy: Strategy
) -> None:
    counting.set_strategy(strategy)
    requests = mixed_requests()
    assert any(request.sampling.temperature == 0.0 for request in requests)
    together = outcome(counting.generate(requests))
    engine.generate(requests[:3])  # draws from the global generator
    assert outcome(counting.generate(requests[::-1])) == together[::-1]
    alone = [outcome(counting.generate([request]))[0][0] for request in requests[:8]]
    assert alone == [tokens for tokens, _, _ in together[:8]]  # log-probs of one row round differently
    other_seeds = [Request(r.request_id, r.prompt_token_ids, r.sampling, seed=r.seed + 1) for r in requests]
    assert outcome(counting.generate(other_seeds)) != together


class _Count(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_the_operations_of_sampling_do_not_grow_with_the_batch(
    counting: VllmEngine, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    counting.set_strategy(strategy)
    runner = counting._runner
    upstream, counts = runner._sample, []

    def counted(logits: torch.Tensor, metadata: Any) -> Any:
        assert not runner.input_batch.generators
        with _Count() as counter:
            sampled = upstream(logits, metadata)
        counts.append(counter.count)
        return sampled

    monkeypatch.setattr(runner, "_sample", counted)
    most = []
    for batch in (2, 24):
        counts.clear()
        spec = SamplingSpec(temperature=1.0, max_tokens=6)
        counting.generate([Request(f"c{i}", prompt, spec, seed=i) for i in range(batch)])
        most.append(max(counts))
    assert most[0] == most[1], f"{most} operations for batches of 2 and 24"


def test_the_key_chooses(strategy: Strategy) -> None:
    from megatron_tlt.rollout.vllm_setup import counts_random_numbers

    chosen = [RolloutConfig(random_numbers=each) for each in ("auto", "generator", "counter")]
    assert [counts_random_numbers(rollout) for rollout in chosen] == [False, False, True]  # auto: this is a CPU
