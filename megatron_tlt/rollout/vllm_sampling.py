"""Sampling in a vLLM engine from each request's seed, without a random generator for each request.

vLLM gives a request with a seed its own generator, and draws from each with a kernel of its own: one per request and
step over the vocabulary, two more where drafts are verified. ``SeededSampler`` computes a step's numbers on the host,
one per token from seed and position (``speculation/uniforms.py``), and copies them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.copies import copy_to_device
from megatron_tlt.rollout.inverse_sampling import Drafts, draft_slots, sample_by_inversion, verify
from megatron_tlt.speculation.uniforms import Use, uniforms


class _Uniforms(dict[int, torch.Generator]):
    """A step's uniform numbers, in the place of a batch's generators, of which it has none.

    ``target_B``, ``verify_BK`` and ``replace_B``: see ``Use``; the last two, ``counts_B`` and ``slots_BL`` are for
    ``inverse_sampling.verify``, in steps with drafts.
    """

    target_B: torch.Tensor
    verify_BK: torch.Tensor
    replace_B: torch.Tensor
    counts_B: torch.Tensor
    slots_BL: torch.Tensor


class SeededSampler:
    """Replaces a runner's generators. Its tokens depend on seed, position and distribution, not on the batch."""

    def __init__(self, runner: Any, seed_of: Callable[[str], int]) -> None:
        """Take over sampling in ``runner``; ``seed_of`` gives a request's seed by vLLM's id.

        Requests must be given to vLLM without their seeds.
        """
        self._runner, self._seed_of = runner, seed_of
        self._uniforms = _Uniforms()
        batch = runner.input_batch
        batch.generators = batch.sampling_metadata.generators = self._uniforms
        choice = runner.sampler.topk_topp_sampler
        choice.forward = choice.forward_native  # the path of a GPU; a CPU build has another one
        self._upstream = runner._sample
        runner._sample = self._sample
        _replace_functions()

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """Replaces the runner's ``_sample``, and computes the step's numbers before it."""
        batch = self._runner.input_batch
        if not batch.sampling_metadata.all_greedy:
            drafted = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
            self._compute(batch, np.array(drafted or [0] * batch.num_reqs))
        return self._upstream(logits, spec_decode_metadata)

    def _compute(self, batch: Any, counts: np.ndarray) -> None:
        seeds = np.array([self._seed_of(name) for name in batch.req_ids], dtype=np.uint64)
        positions = batch.num_tokens_no_spec[: batch.num_reqs].astype(np.uint64)
        arrays = {"target_B": uniforms(Use.TARGET, seeds, positions + counts.astype(np.uint64))}
        if counts.any():
            columns = np.arange(counts.max(), dtype=np.uint64)
            verified = uniforms(Use.VERIFY, seeds[:, None], positions[:, None] + columns)
            arrays |= {
                "verify_BK": np.where(columns < counts[:, None], verified, np.inf),
                "replace_B": uniforms(Use.REPLACE, seeds, positions),  # one of a request's drafts is replaced at most
                "counts_B": counts,
                "slots_BL": draft_slots(counts),
            }
        vars(self._uniforms).update(zip(arrays, copy_to_device([*arrays.values()], self._runner.device), strict=True))


def _replace_functions() -> None:
    """Make two functions of vLLM use ``_Uniforms`` where a batch has them; other engines' batches are unaffected."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    if topk_topp_sampler.random_sample is _random_sample:
        return
    global _upstream_sample, _upstream_verify
    _upstream_sample, topk_topp_sampler.random_sample = topk_topp_sampler.random_sample, _random_sample
    _upstream_verify, rejection_sampler.rejection_sample = rejection_sampler.rejection_sample, _rejection_sample


_upstream_sample: Callable[..., torch.Tensor]
_upstream_verify: Callable[..., torch.Tensor]


def _random_sample(probs: torch.Tensor, generators: Any, *rest: Any) -> torch.Tensor:
    """Replaces ``random_sample``: probs (requests, vocabulary) -> ids (requests)."""
    if not isinstance(generators, _Uniforms):
        return _upstream_sample(probs, generators, *rest)
    if len(probs) != len(generators.target_B):
        raise RunError(f"vLLM samples {len(probs)} tokens; allowed: {len(generators.target_B)}, one for each request")
    return sample_by_inversion(probs, generators.target_B)


def _rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    **rest: Any,
) -> torch.Tensor:
    """Replaces ``rejection_sample``; see vLLM's for the shapes, ``inverse_sampling.verify`` for the result."""
    numbers = sampling_metadata.generators
    given = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits)
    if not isinstance(numbers, _Uniforms) or sampling_metadata.all_greedy or not len(draft_token_ids):
        return _upstream_verify(*given, bonus_token_ids, sampling_metadata, **rest)
    return verify(
        Drafts(draft_token_ids, draft_probs, numbers.counts_B, numbers.slots_BL),
        target_logits,
        bonus_token_ids[:, 0].long(),
        None if sampling_metadata.all_random else sampling_metadata.temperature == 0,
        numbers.verify_BK,
        numbers.replace_B,
    )
