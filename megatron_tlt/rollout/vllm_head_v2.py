"""A drafter model in vLLM's second model runner, which drafts by vLLM's own speculator.

Suffixes of tensors: R requests of the batch, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_IMPOSSIBLE = -1e9
"""A logit whose probability is 0 at any temperature, and finite, so that differences of logits are numbers."""


class HeadV2:
    """Sets the speculator's number of drafts per step, and reads how sure it is of them.

    Args:
        speculator: the runner's, built within ``measured_speculator`` if ``chances`` are needed.
    """

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._propose = speculator.propose

    def propose(self, input_batch: Any, given: Sequence[Any], options: dict[str, Any], count: int) -> torch.Tensor:
        """Process the step's tokens, and draft: (R, most drafts), of which the first ``count`` columns count.

        Args:
            input_batch: vLLM's InputBatch of the step.
            given: further positional arguments of the speculator's ``propose``.
            options: its keyword arguments.
            count: number of drafts of each request; 0: the tokens are processed alone.
        """
        if "num_speculative_tokens" in options:
            drafts: torch.Tensor = self._propose(input_batch, *given, **options | {"num_speculative_tokens": count})
            return drafts
        speculator = self._speculator  # vLLM 0.26 drafts as many as this attribute says
        most, speculator.num_speculative_steps = speculator.num_speculative_steps, max(count, 1)
        try:
            drafts = self._propose(input_batch, *given, **options)
        finally:
            speculator.num_speculative_steps = most
        return drafts

    def likely_counts(self, limits: Sequence[int], least_probability: float) -> list[int]:
        """The number of drafts of each request before the first that is too unlikely, at most ``limits`` (R).

        A draft is too unlikely if the product of the likeliest tokens' probabilities up to it is below
        ``least_probability``. That is known before sampling: to end by the sampled token would bias the output.
        """
        chances_RK = self._speculator.chances[: len(limits), : max(limits)]
        counts = (chances_RK.cumprod(dim=1) >= least_probability).sum(dim=1).tolist()  # False for NaN
        return [min(count, limit) for count, limit in zip(counts, limits, strict=True)]

    def make_certain(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Let sampled verification take ``drafts`` (requests, K; -1: none) of the slots' requests as certain."""
        logits = self._speculator.draft_logits
        if logits is not None:
            certain = logits.new_full((*drafts.shape, logits.shape[-1]), _IMPOSSIBLE)
            logits[slots] = certain.scatter_(2, drafts.clamp(min=0)[..., None], 0.0)


@contextmanager
def measured_speculator() -> Iterator[None]:
    """Engines built in this context write ``chances`` (max requests, K): the likeliest token's probability per draft.

    It is at the request's temperature, as sampled drafts are. Graphs that are captured later compute it too.
    """
    from vllm.v1.worker.gpu import model_runner

    upstream = model_runner.init_speculator

    def build(*arguments: Any, **options: Any) -> Any:
        speculator = upstream(*arguments, **options)
        load = speculator.load_model

        def load_and_measure(*given: Any, **named: Any) -> Any:
            result = load(*given, **named)
            speculator.chances = torch.zeros_like(speculator.draft_tokens, dtype=torch.float32)
            speculator.model.compute_logits = _measured(speculator.model.compute_logits, speculator)
            return result

        speculator.load_model = load_and_measure
        return speculator

    model_runner.init_speculator = build
    try:
        yield
    finally:
        model_runner.init_speculator = upstream


def _measured(compute_logits: Callable[..., torch.Tensor], speculator: Any) -> Callable[..., torch.Tensor]:
    def compute(*given: Any, **named: Any) -> torch.Tensor:
        logits_RV = compute_logits(*given, **named)
        rows = logits_RV.shape[0]
        temperatures_R = speculator.temperature[speculator.idx_mapping[:rows].long().clamp(min=0)]
        divisors_R = torch.where(temperatures_R <= 0.0, 1.0, temperatures_R)
        best_R = (logits_RV.float() / divisors_R[:, None]).softmax(dim=-1).amax(dim=-1)
        speculator.chances[:rows].index_copy_(1, speculator.current_draft_step.view(1), best_R[:, None])
        return logits_RV

    return compute
