"""Access to the weights of a drafter model inside a live vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.types import ShardSlice
from megatron_tlt.rollout.vllm_weights import read_weights


def read_drafter_weights(
    drafter: Any, target: torch.nn.Module, names: set[str]
) -> Iterator[tuple[str, torch.Tensor, ShardSlice | None]]:
    """Yield (name in the drafter's folder, this rank's tensor, its slice or None) of the drafter's own parameters.

    Args:
        drafter: vLLM's proposer.
        target: the target model; an embedding or output head shared with it is omitted.
        names: tensor names in the drafter's folder.

    Raises:
        RunError: the folder lacks a parameter.
    """
    model = drafter.model
    model = model.unwrap() if hasattr(model, "unwrap") else model
    table = getattr(model, "draft_id_to_target_id", None)  # of a reduced vocabulary; replicated on every rank
    if table is not None:
        yield "d2t", table.data, None
    without = {id(param) for param in (*target.parameters(), table) if param is not None}
    for name, tensor, shard in read_weights(model, without):
        short = name.removeprefix("model.")
        # EAGLE-3 folders name their first layer "midlayer"; a few use vLLM's name
        known = [form for form in (short, short.replace("layers.0.", "midlayer.", 1)) if form in names]
        if not known:
            raise RunError(
                f"vLLM's drafter holds {short}, which its folder does not have; it cannot be updated by name"
            )
        yield known[0], tensor, shard
