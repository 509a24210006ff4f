"""GSPO's loss: the ratio of a whole response, clipped."""

from __future__ import annotations

import torch

from megatron_tlt.algorithms.losses import LossInputs, Metrics
from megatron_tlt.algorithms.policy_loss import PolicyLoss, clip_metrics


class GspoLoss(PolicyLoss):
    """The clipped surrogate with one ratio per response (GSPO-token, 2507.18071, eqs. 7, 13, 14).

    The ratio is the geometric mean of the tokens' ratios. Each token has it as its value and its own log-prob's
    gradient: s = sg(s_response) p / sg(p). With one advantage per response, that is GSPO.
    """

    applies = (*PolicyLoss.applies, "correction.bypass", "clip_low", "clip_high")

    def surrogate(self, log_probs_BT: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        config = self.config
        tokens_B1 = inputs.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_B1 = (log_probs_BT - inputs.old_log_probs_BT).sum(dim=1, keepdim=True) / tokens_B1
        # 0 outside of the mask, where both of its parts are 0
        own_gradient = log_probs_BT - log_probs_BT.detach()
        ratio = torch.exp(log_ratio_B1.detach() + own_gradient) * inputs.mask_BT
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * inputs.mask_BT
        unclipped_gain, clipped_gain = ratio * inputs.advantages_BT, clipped * inputs.advantages_BT
        return -torch.minimum(unclipped_gain, clipped_gain), clip_metrics(clipped_gain < unclipped_gain, ratio)
