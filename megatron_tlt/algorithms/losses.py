"""Losses on per-token log-probabilities; they need no process group and no model.

Shapes: B sequences padded to T label positions. ``mask_BT`` is 1 at the positions whose label is a response token.
Every loss returns a *sum* and a separate denominator, so that micro-batches and data-parallel ranks add up exactly.
Values at masked positions affect neither the loss nor the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

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

    @property
    def inside_BT(self) -> torch.Tensor:
        """The mask as booleans."""
        return self.mask_BT > 0

    def zero_outside(self) -> LossInputs:
        """The same columns with 0 at masked positions, because infinity times a mask of 0 is NaN."""
        columns = (getattr(self, column.name) for column in fields(self))
        return LossInputs(*(torch.where(self.inside_BT, column, 0.0) for column in columns))


class Loss(Protocol):
    """The objective of an update: its sum over micro-batches and ranks, divided by the sum of the denominators."""

    def denominator(self, inputs: LossInputs) -> torch.Tensor:
        """The micro-batch's part of the denominator, a scalar; computed without a forward pass."""
        ...

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, Metrics]:
        """The sum, a scalar, and the metrics to log: any names, each value a sum over the response tokens.

        ``log_probs_BT`` and ``entropy_BT`` (nats) belong to the trained policy. An update logs each metric divided by
        the number of response tokens in all micro-batches and ranks.
        """
        ...


class NegativeLogLikelihood:
    """Supervised loss: mean negative log-likelihood of the response tokens."""

    def denominator(self, inputs: LossInputs) -> torch.Tensor:
        return inputs.mask_BT.sum()

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, Metrics]:
        loss = -torch.where(inputs.inside_BT, log_probs_BT, 0.0).sum()
        return loss, {"loss": loss.detach()}


negative_log_likelihood = NegativeLogLikelihood()


def k3_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate r - 1 - log r of KL(p || q), with r = q / p at samples of p; unbiased, non-negative."""
    log_ratio = other_log_probs - log_probs
    return torch.expm1(log_ratio) - log_ratio


class ClippedPolicyLoss:
    """The clipped surrogate of PPO/GRPO (2402.03300, eq. 3; asymmetric clip as in DAPO 2503.14476, eq. 10).

    ``token_mean`` weights every response token of the mini-batch equally, ``sequence_mean`` every response.
    ``kl_coefficient`` adds the k3 estimate against the reference policy, ``entropy_coefficient`` subtracts the entropy.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    def denominator(self, inputs: LossInputs) -> torch.Tensor:
        if self._config.loss_aggregation == "sequence_mean":
            return (inputs.mask_BT.sum(dim=1) > 0).float().sum()
        return inputs.mask_BT.sum()

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, Metrics]:
        config, inside = self._config, inputs.inside_BT
        log_probs_BT = torch.where(inside, log_probs_BT, 0.0)
        entropy_BT = torch.where(inside, entropy_BT, 0.0)
        inputs = inputs.zero_outside()
        ratio = torch.exp(log_probs_BT - inputs.old_log_probs_BT)
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        unclipped_gain, clipped_gain = ratio * inputs.advantages_BT, clipped * inputs.advantages_BT
        token_loss = -torch.minimum(unclipped_gain, clipped_gain) * inputs.token_weights_BT
        metrics: Metrics = {"clip_fraction": (clipped_gain < unclipped_gain).float().sum()}
        metrics["kl"] = token_loss.new_zeros(())
        if config.kl_coefficient:
            kl = k3_estimate(log_probs_BT, inputs.reference_log_probs_BT)
            token_loss = token_loss + config.kl_coefficient * kl
            metrics["kl"] = kl.detach().sum()
        if config.entropy_coefficient:
            token_loss = token_loss - config.entropy_coefficient * entropy_BT
        tokens_B = inputs.mask_BT.sum(dim=1)
        loss = token_loss.sum()
        metrics.update(loss=loss.detach(), entropy=entropy_BT.detach().sum())
        if config.loss_aggregation == "sequence_mean":
            loss = (token_loss.sum(dim=1) / tokens_B.clamp(min=1)).sum()
        return loss, metrics
