"""EAGLE-3 (2503.01840): features of three target layers, its own LM head, training-time test."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from megatron_tlt.drafter.layers import DraftLayer, DraftNorm, UnrolledContext
from megatron_tlt.drafter.model import DraftModel, Kind, SharedWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUM_AUX_LAYERS = 3


class Eagle3Layer(DraftLayer):
    """Attention reads [embedding; feature], each after its own norm; the residual stream is the feature."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = DraftNorm(config)
        self.hidden_norm = DraftNorm(config)


class Eagle3(DraftModel):
    """``eagle_aux_hidden_state_layer_ids`` of its config names the auxiliary layers.

    With a ``draft_vocab_size`` below the vocabulary it drafts only some tokens. As in published folders, ``d2t`` holds
    the target's token id of each LM head row minus the row's index.

    Layer id i means the input of the target's layer i (the output of layer i - 1) before any norm: transformers'
    ``hidden_states[i]`` for i below the number of layers.
    """

    kind: ClassVar[Kind] = "eagle3"

    def __init__(self, config: PretrainedConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.fc = nn.Linear(NUM_AUX_LAYERS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = DraftNorm(config)
        drafted = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, drafted, bias=False)
        self.d2t: torch.Tensor | None
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.long) if drafted < config.vocab_size else None)

    @property
    def feature_size(self) -> int:
        return NUM_AUX_LAYERS * int(self.config.hidden_size)

    @property
    def entry_size(self) -> int:
        return self.feature_size + int(self.config.hidden_size)

    @property
    def head_DH(self) -> torch.Tensor:
        return self.lm_head.weight

    @property
    def draft_ids_D(self) -> torch.Tensor | None:
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def choose_vocabulary(self, weights_V: torch.Tensor) -> None:
        if self.d2t is not None:
            largest = weights_V.sort(descending=True, stable=True).indices[: len(self.d2t)].sort().values
            self.d2t.copy_(largest - torch.arange(len(largest), device=largest.device))
            self.lm_head.weight.copy_(self.shared.head[largest])

    def set_start(self, rms_E: torch.Tensor, scale: float) -> None:
        """Scale the last auxiliary layer's columns to unit size, then to their size after the final norm."""
        hidden = int(self.config.hidden_size)
        with torch.no_grad():
            self.fc.weight.zero_()
            columns = slice(self.feature_size - hidden, self.feature_size)
            self.fc.weight[:, columns] = torch.diag(1.0 / rms_E[columns])
            self.norm.weight.copy_(scale * rms_E[self.feature_size :])

    def combine(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        return self.fc(hidden_TF)

    def forward(
        self, token_ids_T: torch.Tensor, features_TH: torch.Tensor, context: UnrolledContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.midlayer
        normed = (layer.input_layernorm(self.embed(token_ids_T)), layer.hidden_norm(features_TH))
        hidden_TH = layer.run(torch.cat(normed, dim=-1), features_TH, context)
        return self.norm(hidden_TH), hidden_TH
