"""Access to the weights of a drafter model inside a live vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.reshard.views import ViewCache
from megatron_tlt.rollout.vllm_weights import HeldWeight, read_weights


class DrafterWeights:
    """The weights of vLLM's drafter model, under their names in the folder that it was loaded from.

    Args:
        runner: vLLM's model runner, of either generation.
        target: the target model; an embedding or output head shared with it is omitted.
        folder: of the drafter.
    """

    def __init__(self, runner: Any, target: torch.nn.Module, folder: Path) -> None:
        model: Any = (runner.speculator if hasattr(runner, "speculator") else runner.drafter).model
        self._model: Any = model.unwrap() if hasattr(model, "unwrap") else model
        self._target = target
        self._folder = SafetensorsFolder(folder)
        self._names = set(self._folder.names)
        self._views = ViewCache[HeldWeight]([self._model])

    def read(self) -> list[HeldWeight]:
        """List (name, this rank's tensor, its slice or None) of the drafter's own parameters; see ``read_weights``.

        Raises:
            RunError: the folder lacks a parameter.
        """
        return self._views.get(self._read)

    def _read(self) -> Iterator[HeldWeight]:
        table = getattr(self._model, "draft_id_to_target_id", None)  # of a reduced vocabulary; replicated on every rank
        if table is not None:
            yield "d2t", table.data, None
        without = {id(param) for param in (*self._target.parameters(), table) if param is not None}
        for name, tensor, shard in read_weights(self._model, without):
            short = name.removeprefix("model.")
            # EAGLE-3 folders name their first layer "midlayer"; a few use vLLM's name
            known = [form for form in (short, short.replace("layers.0.", "midlayer.", 1)) if form in self._names]
            if not known:
                raise RunError(
                    f"vLLM's drafter holds {short}, which its folder does not have; it cannot be updated by name"
                )
            yield known[0], tensor, shard

    @torch.no_grad()
    def restore(self) -> None:
        """Write the folder's tensors into the parameters."""
        for name, view, part in self.read():
            view.copy_(
                self._folder.read(name) if part is None else self._folder.read(name, part.dim, part.start, part.length)
            )


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
