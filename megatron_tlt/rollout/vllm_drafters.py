"""Drafters inside a live vLLM engine: switching them on and off, and the weights of those that are models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.types import ShardSlice
from megatron_tlt.rollout.vllm_weights import read_weights

# drafters that are models of their own, by vLLM's name of the method
MODEL_DRAFTERS = ("eagle", "eagle3")


class DraftSwitch:
    """Turns drafting on and off between two engine steps.

    A drafter that only looks at tokens is replaced by one that proposes nothing. A drafter model must see every token,
    or its KV cache would have gaps: it goes on running, and the scheduler asks it for zero tokens.
    """

    def __init__(self, runner: Any, scheduler: Any, max_num_seqs: int, drafter: str) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._is_model = drafter in MODEL_DRAFTERS
        self._none = [0] * (max_num_seqs + 1)
        self._lengths: list[int] | None = None

    def off(self) -> None:
        """Draft nothing; must be on."""
        if self._is_model:
            self._lengths, self._scheduler.dynamic_sd_lookup = self._scheduler.dynamic_sd_lookup, self._none
        else:
            self._runner.drafter.propose = _propose_nothing

    def on(self) -> None:
        """Draft again; must be off."""
        if self._is_model:
            self._scheduler.dynamic_sd_lookup = self._lengths
        else:
            del self._runner.drafter.propose  # the class's own shows again


def _propose_nothing(
    num_speculative_tokens: int, sampled_token_ids: list[list[int]], *_: Any, **__: Any
) -> list[list[int]]:
    """A drafter's ``propose`` that drafts nothing for any row."""
    return [[] for _ in sampled_token_ids]


def read_drafter_weights(
    drafter: Any, target: torch.nn.Module, names: set[str]
) -> Iterator[tuple[str, torch.Tensor, ShardSlice | None]]:
    """Yield (name in the drafter's folder, this rank's tensor, its slice or None) of the drafter's own parameters.

    Args:
        drafter: vLLM's proposer.
        target: the model it drafts for; an embedding or output head that is the target's own is left out.
        names: of the tensors in the drafter's folder. Its table of a reduced vocabulary is fixed and left out.

    Raises:
        RunError: a parameter that the folder does not have.
    """
    model = drafter.model
    model = model.unwrap() if hasattr(model, "unwrap") else model
    fixed = [getattr(model, "draft_id_to_target_id", None)]
    without = {id(param) for param in (*target.parameters(), *fixed) if param is not None}
    for name, tensor, shard in read_weights(model, without):
        short = name.removeprefix("model.")
        # EAGLE-3 folders call their first layer so; a few, like vLLM, do not
        known = [form for form in (short, short.replace("layers.0.", "midlayer.", 1)) if form in names]
        if not known:
            raise RunError(
                f"vLLM's drafter holds {short}, which its folder does not have; it cannot be updated by name"
            )
        yield known[0], tensor, shard
