"""Hidden states of a target, computed offline by transformers from its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.errors import ConfigError


class TargetStates:
    """The drafter's training input, computed one sequence at a time.

    Args:
        folder: the target's Hugging Face folder; computation uses the dtype of its stored weights.
        aux_layers: layers whose input is taken; the number of layers means the stream before the final norm. The states
            after the final norm follow, and are the only ones without auxiliary layers (EAGLE).
        device: where to compute.

    Raises:
        ConfigError: transformers cannot load the folder.
    """

    def __init__(self, folder: Path, aux_layers: Sequence[int], device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{folder}: transformers cannot load it: {str(error).splitlines()[0]}") from error
        self._model: Any = model.base_model.to(device).eval()  # without the LM head, as no logits are needed
        self._aux_layers, self._device = tuple(aux_layers), device

    @torch.no_grad()
    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """(T) -> (T, (k + 1) H) for k auxiliary layers; in bfloat16, on the host."""
        inputs = token_ids_T[None].long().to(self._device)
        before_norm: list[torch.Tensor] = []
        hook = self._model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
        try:
            states = list(self._model(inputs, output_hidden_states=True, use_cache=False).hidden_states)
        finally:
            hook.remove()
        final, states[-1] = states[-1], before_norm[0]  # transformers returns the normed states in this place
        return torch.cat([*(states[layer][0] for layer in self._aux_layers), final[0]], dim=-1).bfloat16().cpu()
