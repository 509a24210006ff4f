"""Access to the weights of a drafter model inside a live vLLM engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.rollout.types import ShardSlice
from megatron_tlt.rollout.vllm_weights import read_weights


@torch.no_grad()
def load_drafter_weights(
    weights: Iterable[tuple[str, torch.Tensor, ShardSlice | None]], folder: SafetensorsFolder
) -> None:
    """Write the drafter's folder into its parameters, given as by ``read_drafter_weights``."""
    for name, view, part in weights:
        view.copy_(folder.read(name) if part is None else folder.read(name, part.dim, part.start, part.length))


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


class NoProposer:
    """Placeholder ``custom_class`` drafter for an engine without a head; ``StrategySwitch`` replaces its methods."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *_: Any) -> None:
        """Do nothing."""

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """Never called.

        Raises:
            RunError: always.
        """
        raise RunError("vLLM called the placeholder drafter that StrategySwitch replaces")
