"""Base class of the losses of policy-gradient algorithms: what all but the surrogate have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from megatron_tlt.algorithms.kl import ESTIMATORS
from megatron_tlt.algorithms.losses import LossInputs, Metrics
from megatron_tlt.config.algorithm import AlgorithmConfig


class PolicyLoss(ABC):
    """A surrogate per token, the weights of the mismatch's correction, KL and entropy terms, and their aggregation.

    ``loss_aggregation``: ``token_mean`` weights every response token of the mini-batch equally, ``sequence_mean`` every
    response; ``sequence_sum_norm`` divides the sum of all tokens by responses times a constant (Dr. GRPO 2503.20783,
    section 3.2). ``correction.opsm_delta`` leaves responses out whose advantage is negative and that the policy has
    moved away from (off-policy sequence masking, DeepSeek-V3.2 2512.02556, section 3.1). The KL term is against the
    reference policy; the entropy is subtracted. A subclass adds to ``applies`` the keys that its surrogate reads, and
    ``correction.bypass`` if it depends on the ratio to the old policy (see ``losses.Loss``).
    """

    applies: ClassVar[tuple[str, ...]] = (
        "correction.weights",
        "correction.opsm_delta",
        "kl.coefficient",
        "entropy_coefficient",
        "loss_aggregation",
    )

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @abstractmethod
    def surrogate(self, log_probs_BT: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """Each token's loss (B, T), to be minimized, and sums over the response tokens to log.

        Masked positions of all columns are 0.
        """

    def denominator(self, inputs: LossInputs) -> torch.Tensor:
        if self.config.loss_aggregation == "token_mean":
            return inputs.mask_BT.sum()
        sequences = (inputs.mask_BT.sum(dim=1) > 0).float().sum()
        if self.config.loss_aggregation == "sequence_mean":
            return sequences
        assert self.config.sequence_norm_tokens is not None, "the config's checks demand it"
        return sequences * self.config.sequence_norm_tokens

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, Metrics]:
        config, inside = self.config, inputs.inside_BT
        log_probs_BT = torch.where(inside, log_probs_BT, 0.0)
        entropy_BT = torch.where(inside, entropy_BT, 0.0)
        inputs = inputs.zero_outside()
        token_loss, metrics = self.surrogate(log_probs_BT, inputs)
        token_loss = token_loss * inputs.token_weights_BT
        if config.correction.opsm_delta is not None:
            tokens_B = inputs.mask_BT.sum(dim=1).clamp(min=1)
            drift_B = (inputs.old_log_probs_BT - log_probs_BT.detach()).sum(dim=1) / tokens_B
            stale_BT = (drift_B > config.correction.opsm_delta)[:, None] & (inputs.advantages_BT < 0)
            token_loss = torch.where(stale_BT, 0.0, token_loss)
            metrics["opsm_fraction"] = stale_BT.float().sum()
        metrics["policy_kl"] = (inputs.old_log_probs_BT - log_probs_BT.detach()).sum()
        metrics["kl"] = token_loss.new_zeros(())
        if config.kl.coefficient:
            kl = ESTIMATORS[config.kl.estimator](log_probs_BT, inputs.reference_log_probs_BT)
            metrics["kl"] = kl.detach().sum()
            if config.kl.placement == "loss":
                token_loss = token_loss + config.kl.coefficient * kl
        if config.entropy_coefficient:
            token_loss = token_loss - config.entropy_coefficient * entropy_BT
        loss = token_loss.sum()
        metrics.update(loss=loss.detach(), entropy=entropy_BT.detach().sum())
        if config.loss_aggregation == "sequence_mean":
            loss = (token_loss.sum(dim=1) / inputs.mask_BT.sum(dim=1).clamp(min=1)).sum()
        return loss, metrics


def clip_metrics(clipped_BT: torch.Tensor, ratio_BT: torch.Tensor) -> Metrics:
    """Counts of the tokens that a clip acts on, and of those below and above its range."""
    above_BT = clipped_BT & (ratio_BT.detach() > 1.0)
    return {
        "clip_fraction": clipped_BT.float().sum(),
        "clip_fraction_low": (clipped_BT & ~above_BT).float().sum(),
        "clip_fraction_high": above_BT.float().sum(),
    }
