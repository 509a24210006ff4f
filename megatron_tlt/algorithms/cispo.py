"""CISPO's loss: clipped importance weights on the gradient of every token."""

from __future__ import annotations

import torch

from megatron_tlt.algorithms.losses import LossInputs, Metrics
from megatron_tlt.algorithms.policy_loss import PolicyLoss, clip_metrics


class CispoLoss(PolicyLoss):
    """-sg(clip(r)) A log p with r = p / p_old (MiniMax-M1, 2506.13585, eqs. 4, 5): no token loses its gradient."""

    applies = (*PolicyLoss.applies, "correction.bypass", "clip_low", "clip_high")

    def surrogate(self, log_probs_BT: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        config = self.config
        ratio = torch.exp(log_probs_BT.detach() - inputs.old_log_probs_BT)
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        metrics = clip_metrics((clipped != ratio) & inputs.inside_BT, ratio)
        return -clipped * inputs.advantages_BT * log_probs_BT, metrics
