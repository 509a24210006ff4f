"""Speculation never changes the distribution: greedy identity, and chi-squared against exact marginals."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec
from megatron_tlt.speculation.strategy import OFF
from tests.helpers.statistics import chi_squared_p_value
from tests.helpers.tiny_models import greedy, processed_log_probs

from .conftest import NGRAM, VOCAB

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

SAMPLES = 6400


def greedy_requests(count: int, max_tokens: int) -> list[Request]:
    rng = random.Random(11)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(3, 12))) * 3 for _ in range(count)]
    spec = SamplingSpec(temperature=0.0, max_tokens=max_tokens)
    return [Request(f"g{i}", prompt, spec, seed=i) for i, prompt in enumerate(prompts)]


def total_draft(responses: list[Response]) -> DraftStats:
    return sum((response.draft for response in responses), DraftStats())


def test_greedy_is_identical_with_and_without_speculation_and_in_transformers(
    engine: VllmEngine, plain_engine: VllmEngine, reference: Qwen2ForCausalLM
) -> None:
    requests = greedy_requests(count=24, max_tokens=40)
    speculating = engine.generate(requests)
    engine.set_strategy(OFF)
    switched_off = engine.generate(requests)
    engine.set_strategy(NGRAM)
    plain = plain_engine.generate(requests)
    for response in speculating:
        assert len(response.token_ids) == 40
        assert list(response.token_ids) == greedy(reference, response.prompt_token_ids, response.token_ids)
    expected = [response.token_ids for response in speculating]
    assert [response.token_ids for response in switched_off] == expected
    assert [response.token_ids for response in plain] == expected
    drafts = total_draft(speculating)
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens  # some right, some wrong
    assert total_draft(switched_off).num_draft_tokens == 0
    assert total_draft(plain).num_draft_tokens == 0


@torch.no_grad()
def exact_marginals(
    reference: Qwen2ForCausalLM, prompt: tuple[int, ...], temperature: float, top_p: float, top_k: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact P(t1, t2) as (vocabulary, vocabulary) and P(t3) as (vocabulary) of what follows ``prompt``."""
    pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    sequences = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], dim=1)
    logits = torch.cat([reference(batch).logits[:, len(prompt) - 1 :] for batch in sequences.split(256)])
    probs = processed_log_probs(logits, temperature, top_p, top_k).exp()  # (pairs, 3, vocabulary)
    index = torch.arange(len(pairs))
    joint = probs[index, 0, pairs[:, 0]] * probs[index, 1, pairs[:, 1]]
    return joint.view(VOCAB, VOCAB), (joint[:, None] * probs[:, 2]).sum(0)


def sampled_counts(responses: list[Response]) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each (t1, t2) was sampled, as (vocabulary, vocabulary), and each t3, as (vocabulary)."""
    tokens = torch.tensor([list(response.token_ids) for response in responses])
    joint = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB * VOCAB)
    return joint.view(VOCAB, VOCAB), torch.bincount(tokens[:, 2], minlength=VOCAB)


def sampled_p_values(
    engine: VllmEngine,
    reference: Qwen2ForCausalLM,
    prompt: tuple[int, ...],
    temperature: float,
    top_p: float,
    samples: int = SAMPLES,
) -> tuple[float, float, DraftStats]:
    """p-values of the first two tokens' joint and the third one's marginal, and what became of the drafts."""
    spec = SamplingSpec(temperature=temperature, top_p=top_p, max_tokens=3)
    responses = engine.generate([Request(f"s{i}", prompt, spec, seed=i) for i in range(samples)])
    counts, exact = sampled_counts(responses), exact_marginals(reference, prompt, temperature, top_p)
    joint_p, third_p = (chi_squared_p_value(*pair) for pair in zip(counts, exact, strict=True))
    return joint_p, third_p, total_draft(responses)


@pytest.mark.cpu_patch
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_samples_have_the_exact_marginals(
    engine: VllmEngine, reference: Qwen2ForCausalLM, prompt: tuple[int, ...], temperature: float, top_p: float
) -> None:
    joint_p, third_p, drafts = sampled_p_values(engine, reference, prompt, temperature, top_p)
    # nearly each sample had its second token drafted; thousands of drafts went either way
    assert drafts.num_drafts > 0.9 * SAMPLES
    assert drafts.num_draft_tokens - drafts.num_accepted_tokens > 1000
    assert drafts.num_accepted_tokens > 200
    assert min(joint_p, third_p) > 1e-4, f"p-values {joint_p:.3g} (tokens 1 and 2), {third_p:.3g} (token 3)"


def test_the_statistic_sees_a_small_tilt() -> None:
    """The yardstick itself: it passes the truth and refuses a distribution five percent away."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(VOCAB, generator=generator).double()
    exact /= exact.sum()
    tilted = exact * (1 + 0.1 * (torch.arange(VOCAB) % 2))
    tilted /= tilted.sum()

    def p_value(source: torch.Tensor) -> float:
        draws = torch.multinomial(source, 20_000, replacement=True, generator=generator)
        return chi_squared_p_value(torch.bincount(draws, minlength=VOCAB), exact)

    assert p_value(exact) > 1e-3
    assert p_value(tilted) < 1e-3


def test_without_the_cure_the_marginals_are_wrong(
    engine: VllmEngine, reference: Qwen2ForCausalLM, prompt: tuple[int, ...]
) -> None:
    """The same check must refuse vLLM's own CPU function, or it proves nothing."""
    from megatron_tlt.rollout.vllm_patches import apply_cpu_patch, remove_cpu_patch

    if not engine.cpu_patch_applied:
        pytest.skip("this build of vLLM needs no patch")
    remove_cpu_patch()
    try:
        p_values = [
            sampled_p_values(engine, reference, prompt, *setting, samples=1000)[0]
            for setting in ((1.0, 1.0), (0.7, 0.9))
        ]
    finally:
        assert apply_cpu_patch()
    assert max(p_values) < 1e-9
