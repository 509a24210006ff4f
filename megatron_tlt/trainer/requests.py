"""Requests of rollouts and evaluations: seeds, sampling parameters, the limit of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial

from megatron_tlt.config.evaluation import EvaluationSettings
from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.data.tokenizer import Tokenizer, encode_prompt, prompt_lengths
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.types import Problem


def request_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all of ``parts`` and nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def training_sampling(rollout: RolloutConfig, tokenizer: Tokenizer) -> SamplingSpec:
    """Sampling parameters of training rollouts; any of the tokenizer's ``stop_ids`` ends a response."""
    sampling = rollout.sampling
    return SamplingSpec(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tokenizer.stop_ids,
    )


def evaluation_sampling(
    settings: EvaluationSettings, rollout: RolloutConfig, tokenizer: Tokenizer, *, greedy: bool = False
) -> SamplingSpec:
    """Sampling parameters of an evaluation; top-p and top-k default to the rollout's if ``settings`` has none."""
    sampling = rollout.sampling
    top_p = sampling.top_p if settings.top_p is None else settings.top_p
    top_k = sampling.top_k if settings.top_k is None else settings.top_k
    return SamplingSpec(
        temperature=0.0 if greedy else settings.temperature,
        top_p=1.0 if greedy else top_p,
        top_k=-1 if greedy else top_k,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tokenizer.stop_ids,
    )


def prompt_limit(rollout: RolloutConfig, tokenizer: Tokenizer) -> PromptLimit:
    """The longest prompt of a run, in this tokenizer's tokens."""
    return PromptLimit(rollout.max_prompt_tokens, rollout.filter_overlong_prompts, partial(prompt_lengths, tokenizer))


def one_request_each(
    problems: Iterable[Problem], tokenizer: Tokenizer, sampling: SamplingSpec, *seed_parts: object
) -> list[Request]:
    """One request per problem, outside of a run; the i-th request's seed depends on ``seed_parts`` and i.

    The requests have no problem key, so drafters keep no history of their responses.
    """
    return [
        Request(str(i), tuple(encode_prompt(tokenizer, problem)), sampling, request_seed(*seed_parts, i))
        for i, problem in enumerate(problems)
    ]
