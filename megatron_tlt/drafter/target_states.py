"""Hidden states of a target, computed offline by transformers from its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.drafter.model import Kind
from megatron_tlt.errors import ConfigError


class TargetStates:
    """What a drafter learns from, one sequence at a time.

    Args:
        folder: the target's Hugging Face folder; computed in the dtype that its weights are stored in.
        kind: EAGLE takes the states behind the final norm, EAGLE-3 those that enter the tapped layers.
        taps: EAGLE-3's layers; the number of layers itself means the stream before the final norm.
        device: where to compute.

    Raises:
        ConfigError: transformers cannot load the folder.
    """

    def __init__(self, folder: Path, kind: Kind, taps: Sequence[int], device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{folder}: transformers cannot load it: {str(error).splitlines()[0]}") from error
        self._model: Any = model.base_model.to(device).eval()  # no logits: they are not asked for
        self._kind, self._taps, self._device = kind, tuple(taps), device

    @torch.no_grad()
    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """(T) -> (T, H), or (T, 3 H) for EAGLE-3; in bfloat16, on the host."""
        inputs = token_ids_T[None].long().to(self._device)
        if self._kind == "eagle":
            hidden = self._model(inputs, use_cache=False).last_hidden_state[0]
            return hidden.bfloat16().cpu()
        before_norm: list[torch.Tensor] = []
        hook = self._model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
        try:
            states = list(self._model(inputs, output_hidden_states=True, use_cache=False).hidden_states)
        finally:
            hook.remove()
        states[-1] = before_norm[0]  # transformers gives the normed ones at this place
        return torch.cat([states[tap][0] for tap in self._taps], dim=-1).bfloat16().cpu()
