"""The clipped surrogate of PPO and GRPO."""

from __future__ import annotations

import torch

from megatron_tlt.algorithms.losses import LossInputs, Metrics
from megatron_tlt.algorithms.policy_loss import PolicyLoss, clip_metrics


class ClippedPolicyLoss(PolicyLoss):
    """max(-r A, -clip(r) A) with r = p / p_old (2402.03300, eq. 3; asymmetric clip as in DAPO 2503.14476, eq. 10).

    ``dual_clip`` c bounds the loss of tokens with a negative advantage by -c A (Dual-Clip PPO, 1912.09729, eq. 5).
    """

    applies = (*PolicyLoss.applies, "correction.bypass", "clip_low", "clip_high", "dual_clip")

    def surrogate(self, log_probs_BT: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        config, advantages_BT = self.config, inputs.advantages_BT
        ratio = torch.exp(log_probs_BT - inputs.old_log_probs_BT)
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        unclipped_gain, clipped_gain = ratio * advantages_BT, clipped * advantages_BT
        gain = torch.minimum(unclipped_gain, clipped_gain)
        metrics = clip_metrics(clipped_gain < unclipped_gain, ratio)
        if config.dual_clip is not None:
            lowest = torch.where(advantages_BT < 0, config.dual_clip * advantages_BT, gain)
            metrics["dual_clip_fraction"] = (lowest > gain).float().sum()
            gain = torch.maximum(gain, lowest)
        return -gain, metrics
