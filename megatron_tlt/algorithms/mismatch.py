"""The difference between the rollout's log-probabilities and the actor's for the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_tlt.config.algorithm import MismatchConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError


@dataclass(frozen=True)
class Mismatch:
    """Over response tokens of a step: mean and maximum absolute difference (nats), k3 estimate of KL."""

    mean_abs: float
    max_abs: float
    k3_kl: float

    @staticmethod
    def of(rows_N4: torch.Tensor) -> Mismatch:
        """Aggregates the rows of :func:`mismatch_per_sample` over all samples."""
        sums = rows_N4.sum(dim=0)
        tokens = sums[3].clamp(min=1)
        return Mismatch(float(sums[0] / tokens), float(rows_N4[:, 1].max()), float(sums[2] / tokens))


def mismatch_per_sample(batch: RolloutBatch, *, stale: bool = False) -> torch.Tensor:
    """Compares the old log-probs with the rollout's for each of the H held samples, (H, 4) float64.

    Columns: sum and maximum of the absolute differences (nats), sum of the k3 estimates, number of tokens. Tokens
    outside the loss mask are not counted. Of tokens with versions those of the sample's newest policy count, as only
    they were sampled with the weights that the actor has; with ``stale`` the others.
    """
    rows_H4 = torch.zeros(len(batch.held), 4, dtype=torch.float64)
    for row, sample in zip(rows_H4, batch.held, strict=True):
        old, rollout = (batch.response(name, sample).double() for name in ("old_log_probs_G", "rollout_log_probs_G"))
        log_ratio = old - rollout
        counted = torch.ones_like(log_ratio, dtype=torch.bool)
        if batch.loss_mask_G is not None:
            counted &= batch.response("loss_mask_G", sample)
        if batch.versions_G is not None:
            counted &= (batch.response("versions_G", sample) != batch.versions_N[sample]) == stale
        log_ratio = log_ratio[counted]
        if len(log_ratio):
            absolute = log_ratio.abs()
            k3 = torch.expm1(log_ratio) - log_ratio
            row[:] = torch.stack([absolute.sum(), absolute.max(), k3.sum(), torch.tensor(float(len(log_ratio)))])
    return rows_H4


def enforce(mismatch: Mismatch, config: MismatchConfig, step: int) -> None:
    """Stops the run if ``action`` is ``fail`` and the mismatch is too large.

    Raises:
        RunError: ``action`` is ``fail`` and the mean absolute difference is above ``threshold`` (or not a number).
    """
    if config.action == "fail" and not mismatch.mean_abs <= config.threshold:
        raise RunError(
            f"step {step}: rollout and actor log-probs differ by {mismatch.mean_abs:.4g} nats on average; "
            f"allowed by algorithm.mismatch.threshold: {config.threshold:g}"
        )
