"""Losses on per-token log-probabilities; no process group, no model.

Shapes: B sequences padded to T label positions. ``mask_BT`` is 1 at the positions whose label is a response token.
Every loss returns a *sum* and its denominator, so that micro-batches and data-parallel ranks add up exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_tlt.config.schema import AlgorithmConfig

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LossInputs:
    """Columns of one micro-batch, each (B, T) float32."""

    mask_BT: torch.Tensor
    advantages_BT: torch.Tensor
    old_log_probs_BT: torch.Tensor
    reference_log_probs_BT: torch.Tensor
    token_weights_BT: torch.Tensor


Loss = Callable[[torch.Tensor, torch.Tensor, LossInputs], tuple[torch.Tensor, torch.Tensor, Metrics]]
"""(log_probs_BT, entropy_BT, inputs) -> (loss sum, denominator, sums to be logged, each over response tokens)."""


def negative_log_likelihood(
    log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """Supervised loss: mean negative log-likelihood of the response tokens."""
    loss = -(log_probs_BT * inputs.mask_BT).sum()
    tokens = inputs.mask_BT.sum()
    return loss, tokens, {"loss": loss.detach(), "tokens": tokens}


def k3_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """Schulman's k3: an unbiased, non-negative estimate of KL(p || q) at samples of p, r - 1 - log r with r = q / p."""
    log_ratio = other_log_probs - log_probs
    return torch.expm1(log_ratio) - log_ratio


class ClippedPolicyLoss:
    """The clipped surrogate of PPO/GRPO (2402.03300, eq. 3; asymmetric clip as in DAPO 2503.14476, eq. 10).

    ``token_mean`` weighs every response token of the mini-batch equally, ``sequence_mean`` every response.
    ``kl_coefficient`` adds the k3 estimate against the reference policy, ``entropy_coefficient`` subtracts the entropy.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        config, mask = self._config, inputs.mask_BT
        ratio = torch.exp((log_probs_BT - inputs.old_log_probs_BT) * mask)
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        unclipped_gain, clipped_gain = ratio * inputs.advantages_BT, clipped * inputs.advantages_BT
        token_loss = -torch.minimum(unclipped_gain, clipped_gain) * inputs.token_weights_BT
        metrics: Metrics = {"clip_fraction": ((clipped_gain < unclipped_gain).float() * mask).sum()}
        if config.kl_coefficient:
            kl = k3_estimate(log_probs_BT, inputs.reference_log_probs_BT)
            token_loss = token_loss + config.kl_coefficient * kl
            metrics["kl"] = (kl.detach() * mask).sum()
        if config.entropy_coefficient:
            token_loss = token_loss - config.entropy_coefficient * entropy_BT
        tokens_B = mask.sum(dim=1)
        if config.loss_aggregation == "sequence_mean":
            loss = ((token_loss * mask).sum(dim=1) / tokens_B.clamp(min=1)).sum()
            denominator = (tokens_B > 0).float().sum()
        else:
            loss = (token_loss * mask).sum()
            denominator = tokens_B.sum()
        metrics.update(
            loss=(token_loss.detach() * mask).sum(),
            entropy=(entropy_BT.detach() * mask).sum(),
            tokens=tokens_B.sum(),
        )
        return loss, denominator, metrics
