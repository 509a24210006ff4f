"""EAGLE-3 (2503.01840): features of three of the target's layers, an LM head of its own, training-time test."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from megatron_tlt.drafter.layers import DraftLayer, DraftNorm, UnrolledContext
from megatron_tlt.drafter.model import DraftModel, Kind, SharedWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUM_TAPS = 3


class Eagle3Layer(DraftLayer):
    """Attention reads [embedding; feature], each behind a norm; the residual stream is the feature."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = DraftNorm(config)
        self.hidden_norm = DraftNorm(config)


class Eagle3(DraftModel):
    """``eagle_config.eagle_aux_hidden_state_layer_ids`` of its config names the tapped layers.

    Layer id i means the stream that enters the target's layer i (behind layer i - 1), before any norm: transformers'
    ``hidden_states[i]`` for i below the number of layers.
    """

    kind: ClassVar[Kind] = "eagle3"

    def __init__(self, config: PretrainedConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.fc = nn.Linear(NUM_TAPS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = DraftNorm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def feature_size(self) -> int:
        return NUM_TAPS * int(self.config.hidden_size)

    @property
    def entry_size(self) -> int:
        return self.feature_size + int(self.config.hidden_size)

    @property
    def head_VH(self) -> torch.Tensor:
        return self.lm_head.weight

    def combine(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        return self.fc(hidden_TF)

    def forward(
        self, token_ids_T: torch.Tensor, features_TH: torch.Tensor, context: UnrolledContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.midlayer
        normed = (layer.input_layernorm(self.embed(token_ids_T)), layer.hidden_norm(features_TH))
        hidden_TH = layer.run(torch.cat(normed, dim=-1), features_TH, context)
        return self.norm(hidden_TH), hidden_TH
