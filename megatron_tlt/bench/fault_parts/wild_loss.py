"""A loss that is NaN at times, for runs with a guard."""

from __future__ import annotations

import torch

from megatron_tlt.algorithms.clipped import ClippedPolicyLoss
from megatron_tlt.algorithms.losses import LossInputs, Metrics

PATH = f"{__name__}.NanAtTimes"
_RARELY = 40


class NanAtTimes(ClippedPolicyLoss):
    """NaN for micro-batches with a multiple of 40 response tokens, so in the same steps each time."""

    applies = ClippedPolicyLoss.applies

    def surrogate(self, log_probs_BT: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        loss_BT, metrics = super().surrogate(log_probs_BT, inputs)
        tokens = int(inputs.mask_BT.sum())
        return (loss_BT * float("nan") if tokens and tokens % _RARELY == 0 else loss_BT), metrics
