"""Estimates of KL(p || q) from samples of p (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_tlt.data.rollout_batch import RolloutBatch

_RATIO_BOUND, _ESTIMATE_BOUND = 20.0, 10.0


def k1_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """log p - log q: unbiased, of any sign. As a loss, its gradient is zero on average."""
    return log_probs - other_log_probs


def k2_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2: biased; as a loss, its gradient is that of the divergence."""
    return (log_probs - other_log_probs).square() / 2


def k3_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r, with r = q / p at samples of p: unbiased, never negative."""
    log_ratio = other_log_probs - log_probs
    return torch.expm1(log_ratio) - log_ratio


def low_variance_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """k3 with log r within 20 and the result within 10, as verl's ``low_var_kl``; outside, the gradient is zero."""
    log_ratio = (other_log_probs - log_probs).clamp(-_RATIO_BOUND, _RATIO_BOUND)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=_ESTIMATE_BOUND)


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1_estimate,
    "k2": k2_estimate,
    "k3": k3_estimate,
    "low_variance": low_variance_estimate,
}
"""``algorithm.kl.estimator`` -> function of the log-probs under p and under q, elementwise in nats."""


def kl_per_sample(batch: RolloutBatch, estimator: str) -> torch.Tensor:
    """The estimates of KL(old policy || reference) summed over each of the H held responses, (H, 1) float64.

    Tokens outside the loss mask are not counted.
    """
    estimate = ESTIMATORS[estimator]
    sums_H1 = torch.zeros(len(batch.held), 1, dtype=torch.float64)
    for row, sample in zip(sums_H1, batch.held, strict=True):
        old, reference = (
            batch.response(name, sample).double() for name in ("old_log_probs_G", "reference_log_probs_G")
        )
        kl = estimate(old, reference)
        row[0] = (kl if batch.loss_mask_G is None else kl[batch.response("loss_mask_G", sample)]).sum()
    return sums_H1
