"""Engines' settings and requests for the workers on vLLM's second model runner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec

VOCAB, TEMPERATURE = 32, 0.6
ROLLOUT = RolloutConfig(
    max_prompt_tokens=80,
    max_response_tokens=32,
    model_runner="v2",
    vllm={"dtype": "float32", "max_num_seqs": 32, "block_size": 32},
)


def stats(responses: Sequence[Response]) -> dict[str, int]:
    """Drafted and accepted tokens of all responses."""
    total = sum((response.draft for response in responses), DraftStats())
    return {"drafted": total.num_draft_tokens, "accepted": total.num_accepted_tokens}


def greedy_requests(count: int) -> list[Request]:
    """Requests, two to a problem, with prompts that repeat themselves, so that lookups find something."""
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(VOCAB, (8,), generator=generator).tolist()) * 3 for _ in range(count)]
    spec = SamplingSpec(temperature=0.0, max_tokens=16)
    return [Request(f"g{i}", prompt, spec, i, problem_key=f"p{i % (count // 2)}") for i, prompt in enumerate(prompts)]
