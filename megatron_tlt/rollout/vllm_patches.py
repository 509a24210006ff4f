"""Patches for defects of vLLM's CPU builds; other builds are not changed.

``apply_cpu_patch``: speculation is wrong at temperature > 0. vLLM 0.32's CPU replacement for the Triton kernel of
``expand_batch_to_tokens`` writes into an int64 copy of its output and never copies back. The rejection sampler then
divides logits by uninitialised memory instead of each request's temperature; top-k and top-p are wrong as well.
Greedy requests are not affected.

``survive_steps_without_drafts``: a step in which no request has a draft crashes if one of them samples with top-k.
``draft_without_padding``: padding draft tokens may be accepted.
``harden_kernel_scan``: a second engine cannot start.
``rank_without_compiling``: the first log-prob triggers a 20 s compilation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.vllm_versions import NEWEST_RELEASE

# Set to 1 only to demonstrate that the losslessness tests fail without the patch.
LEAVE_OUT_ENV = "TLT_WITHOUT_CPU_PATCH"

_upstream: Callable[..., Any] | None = None


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value once per token: x (batch), cu_num_tokens (batch, inclusive sums) -> (num_tokens).

    Values equal to ``replace_from`` are replaced by ``replace_to`` first, as in vLLM's function of this name.
    """
    # vLLM's defaults (0, 0) replace nothing
    values = x if replace_from == replace_to else torch.where(x == replace_from, replace_to, x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def apply_cpu_patch() -> bool:
    """Replace the defective function; returns whether the patch is active.

    Does nothing on builds for other devices or if the environment disables the patch. Safe to call twice.
    """
    global _upstream
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu() or os.environ.get(LEAVE_OUT_ENV, "0") == "1":
        return False
    if rejection_sampler.expand_batch_to_tokens is not expand_batch_to_tokens:
        _upstream = rejection_sampler.expand_batch_to_tokens
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return True


def remove_cpu_patch() -> None:
    """Restore vLLM's own function, for tests that compare the two."""
    global _upstream
    from vllm.v1.sample import rejection_sampler

    if _upstream is not None:
        rejection_sampler.expand_batch_to_tokens = _upstream
        _upstream = None


def survive_steps_without_drafts() -> None:
    """Allow a step of zero draft tokens: without Triton vLLM takes the maximum of zero top-k values there."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    upstream = rejection_sampler.apply_sampling_constraints
    if not current_platform.is_cpu() or hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def apply_sampling_constraints(
        logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
    ) -> torch.Tensor:
        return upstream(logits, cu_num_draft_tokens, sampling_metadata) if logits.shape[0] else logits

    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


def draft_without_padding(scheduler: Any, num_speculative_tokens: int, max_num_seqs: int) -> None:
    """Keep an engine's scheduler from choosing draft lengths, and on a CPU from padding requests with drafts of id -1.

    vLLM pads requests with one token left to compute (a prompt whose rest is cached) to keep a CUDA graph's shape.
    Its CPU rejection kernel then reads a probability at index -1 and may accept a padding token. A schedule of draft
    lengths by batch size, here constant, disables the padding. It replaces the second runner's own, which names the
    lengths to capture: ``StrategySwitch`` sets the lengths.

    Raises:
        RunError: this release's scheduler has no such schedule.
    """
    from vllm.platforms import current_platform

    scheduled = getattr(scheduler, "dynamic_sd_lookup", None) is not None
    if not num_speculative_tokens or not (current_platform.is_cpu() or scheduled):
        return
    if not hasattr(scheduler, "dynamic_sd_lookup"):
        raise RunError(f"vllm lacks Scheduler.dynamic_sd_lookup, which rollout uses; install release {NEWEST_RELEASE}")
    scheduler.dynamic_sd_lookup = [num_speculative_tokens] * (max_num_seqs + 1)


def harden_kernel_scan() -> None:
    """Let vLLM's scan of all loaded modules survive objects whose ``__dict__`` is not a dictionary.

    At the start of a CPU worker vLLM reads ``vars(value)`` of every module member. llvmlite (loaded by numba, which
    the ngram drafter uses) has a proxy that returns a function for any attribute, ``__dict__`` included. Without the
    patch no engine can start after numba is imported, nor a second engine after one with a drafter.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.triton_utils import dispatcher

    dispatcher.vars = _plain_vars  # shadows the builtin in that module alone


def _plain_vars(value: Any) -> Mapping[str, Any]:
    namespace = vars(value)
    return namespace if isinstance(namespace, Mapping) else {}


def rank_without_compiling() -> None:
    """Replace a compiled one-line function of log-probs by its plain form: compiling on a CPU takes 20 s."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import sampler

    if current_platform.is_cpu():
        sampler.batched_count_greater_than = _count_greater_or_equal


def _count_greater_or_equal(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Number of entries of each row of x (batch, vocabulary) that are at least values (batch, 1): (batch)."""
    return (x >= values).sum(-1)


def apply_all_patches() -> bool:
    """Apply all patches needed before an engine is built; returns ``apply_cpu_patch``'s result. Repeatable."""
    survive_steps_without_drafts()
    harden_kernel_scan()
    rank_without_compiling()
    return apply_cpu_patch()
