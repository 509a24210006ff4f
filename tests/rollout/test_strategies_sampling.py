"""Samples under changing strategies: exact distributions, and the log-probs of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.strategy import Strategy
from tests.helpers.drafters import RandomChooser
from tests.helpers.statistics import chi_squared_p_value, total_variation
from tests.helpers.tiny_models import logits_of, processed_log_probs

from .conftest import VOCAB, strategies_of
from .test_engine import expected_log_probs, mixed_requests
from .test_lossless import exact_marginals, sampled_counts, total_draft

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

SAMPLES = 20_480


@pytest.mark.cpu_patch
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    # every value of each option; all their pairs take three minutes more
    [(0.7, 0.9, -1), *(pytest.param(*setting, marks=pytest.mark.slow) for setting in [(1.0, 1.0, -1), (1.0, 1.0, 20)])],
)
def test_samples_have_the_exact_marginals_whatever_the_switches(
    drafting: VllmEngine,
    reference: Qwen2ForCausalLM,
    prompt: tuple[int, ...],
    temperature: float,
    top_p: float,
    top_k: int,
) -> None:
    """All requests are one problem's, so that the suffix drafter drafts what samples before these had."""
    head = drafting.strategy
    joint, third = exact_marginals(reference, prompt, temperature, top_p, top_k)
    spec = SamplingSpec(temperature, top_p, top_k, max_tokens=3)
    problem = f"marginals at {temperature}, {top_p}, {top_k}"
    requests = [Request(f"s{i}", prompt, spec, seed=i, problem_key=problem) for i in range(SAMPLES)]
    strategies = [strategy for strategy in strategies_of(drafting) if strategy.num_tokens != 1]
    chooser = RandomChooser(strategies, seed=3, every=4)
    counts = sampled_counts(drafting.generate(requests, chooser=chooser))
    drafting.set_strategy(head)
    for source in {strategy.source for strategy in strategies if strategy.num_tokens}:
        drafted, accepted = chooser.drafts_of(source)
        assert drafted > 1000 and 20 < accepted < drafted - 500, f"{source}: {accepted} of {drafted}"
    for name, observed, exact in zip(("tokens 1 and 2", "token 3"), counts, (joint, third), strict=True):
        assert chi_squared_p_value(observed, exact) > 1e-4, name
        distance, bound = total_variation(observed, exact)
        assert distance < bound, f"{name}: total variation {distance:.4f}, chance explains {bound:.4f}"


def test_log_probs_are_the_targets_whatever_the_switches(drafting: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    head = drafting.strategy
    requests = mixed_requests()
    chooser = RandomChooser(strategies_of(drafting), seed=4, every=2)
    responses = drafting.generate(requests, chooser=chooser)
    drafting.set_strategy(head)
    assert total_draft(responses).num_accepted_tokens > 0
    for request, response in zip(requests, responses, strict=True):
        exact = expected_log_probs(reference, response, request.sampling)
        assert response.log_probs == pytest.approx(exact, abs=1e-4)


@pytest.mark.cpu_patch
def test_min_tokens_keeps_the_exact_marginals(
    drafting: VllmEngine, reference: Qwen2ForCausalLM, prompt: tuple[int, ...]
) -> None:
    """Half of the vocabulary stops, but not before two tokens; the third is free again, drafted or not."""
    head = drafting.strategy
    stops = tuple(range(0, VOCAB, 2))
    barred = torch.tensor([token in stops for token in range(VOCAB)])
    pairs = [(a, b) for a in range(VOCAB) for b in range(VOCAB) if not barred[a] and not barred[b]]
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, a, b] for a, b in pairs])).logits[:, len(prompt) - 1 :].clone()
    logits[:, :2, barred] = float("-inf")
    joint, third = torch.zeros(VOCAB, VOCAB).double(), torch.zeros(VOCAB).double()
    for (a, b), rows in zip(pairs, processed_log_probs(logits, 0.7).exp(), strict=True):
        joint[a, b] = rows[0, a] * rows[1, b]
        third += joint[a, b] * rows[2]

    spec = SamplingSpec(0.7, max_tokens=3, min_tokens=2, stop_token_ids=stops)
    drafting.set_strategy(Strategy("suffix", 1))
    requests = [Request(f"s{i}", prompt, spec, seed=i, problem_key="stops") for i in range(6400)]
    responses = drafting.generate(requests)
    drafting.set_strategy(head)
    assert {len(response.token_ids) for response in responses} == {3}
    for observed, exact in zip(sampled_counts(responses), (joint, third), strict=True):
        assert chi_squared_p_value(observed, exact) > 1e-4


def test_likeliest_tokens_are_reported(drafting: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    spec = SamplingSpec(temperature=0.8, max_tokens=16, logprobs=4)
    request = Request("top", tuple(range(VOCAB)) * 2, spec, seed=1)
    (response,) = drafting.generate([request])
    assert response.draft.num_drafts > 0 and len(response.top_log_probs) == 16
    tokens = (*request.prompt_token_ids, *response.token_ids)
    exact = processed_log_probs(logits_of(reference, tokens)[len(request.prompt_token_ids) - 1 : -1], 0.8)
    values, indices = exact.topk(4, dim=-1)
    for row, (top, ids, log_probs) in enumerate(zip(response.top_log_probs, indices, values, strict=True)):
        assert [token for token, _ in top] == ids.tolist(), row
        assert [value for _, value in top] == pytest.approx(log_probs.tolist(), abs=1e-4)
