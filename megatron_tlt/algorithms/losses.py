"""Losses on per-token log-probabilities; they need no process group and no model.

Shapes: B sequences padded to T label positions. ``mask_BT`` is 1 at the positions whose label is a response token.
Every loss returns a *sum* and a separate denominator, so that micro-batches and data-parallel ranks add up exactly.
Values at masked positions affect neither the loss nor the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch

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
    """The objective of an update: its sum over micro-batches and ranks, divided by the sum of the denominators.

    Its optional attribute ``applies`` names the keys of the ``algorithm`` section that it applies:
    ``correction.weights`` multiplies the loss of each token by ``inputs.token_weights_BT``, ``correction.opsm_delta``
    leaves out responses by it, ``correction.bypass`` depends on the ratio of the policy to ``inputs.old_log_probs_BT``,
    which are the rollout's then, ``kl.coefficient`` adds the penalty against ``inputs.reference_log_probs_BT``, and
    ``entropy_coefficient``, ``loss_aggregation``, ``clip_low``, ``clip_high`` and ``dual_clip`` are what they say. A
    config that sets one which the loss does not name is refused (``algorithms.loss_keys``).
    """

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
