"""EAGLE (2401.15077): one decoder layer over fc[embedding; hidden], followed by the target's own LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from megatron_tlt.drafter.layers import DraftLayer, UnrolledContext
from megatron_tlt.drafter.model import DraftModel, Kind, SharedWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Eagle(DraftModel):
    """Features are the target's hidden states after its final norm; the LM head reads them without another norm."""

    kind: ClassVar[Kind] = "eagle"

    def __init__(self, config: PretrainedConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config, config.hidden_size)])

    @property
    def feature_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def entry_size(self) -> int:
        return self.feature_size

    @property
    def head_DH(self) -> torch.Tensor:
        return self.shared.head

    def set_start(self, rms_E: torch.Tensor, scale: float) -> None:
        """The feature is already in the space of the LM head's input, so all columns have the same scale."""
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -self.feature_size :].fill_diagonal_(scale)

    def combine(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        return hidden_TF

    def forward(
        self, token_ids_T: torch.Tensor, features_TH: torch.Tensor, context: UnrolledContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH = self.fc(torch.cat((self.embed(token_ids_T), features_TH), dim=-1))
        layer: DraftLayer = self.layers[0]  # type: ignore[assignment]
        hidden_TH = layer.run(x_TH, x_TH, context)
        return hidden_TH, hidden_TH
