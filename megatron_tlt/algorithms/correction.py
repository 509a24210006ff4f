"""Corrections for responses that were sampled by a slightly different policy than the one that is trained.

The ratio of a token is pi_actor / pi_rollout, both before the update. Truncated importance weights by token or response
and the rejection of responses by the geometric mean of their ratios are verl's ``rollout_correction``; a weight of 0
outside of bounds is IcePop's.
"""

from __future__ import annotations

import math

import torch

from megatron_tlt.algorithms.kl import k3_estimate
from megatron_tlt.config.algorithm import CorrectionConfig
from megatron_tlt.data.rollout_batch import RolloutBatch

_NUM_SUMS = 5


def correct(batch: RolloutBatch, config: CorrectionConfig) -> tuple[RolloutBatch, torch.Tensor]:
    """Weights the tokens of the held samples and leaves rejected responses out of the loss.

    Args:
        batch: with the rollout's and the actor's old log-probs of the H held samples.
        config: must select a weight, bounds or a rejection.

    Returns:
        The batch with ``token_weights_G`` and, where responses can be rejected, ``loss_mask_G``; and sums per held
        sample for :func:`correction_metrics`, (H, 5) float64.
    """
    assert batch.old_log_probs_G is not None
    weights_G = torch.ones(len(batch.old_log_probs_G))
    mask_G = torch.ones(len(weights_G), dtype=torch.bool) if batch.loss_mask_G is None else batch.loss_mask_G.clone()
    sums_H5 = torch.zeros(len(batch.held), _NUM_SUMS, dtype=torch.float64)
    begin = 0
    for row, sample in zip(sums_H5, batch.held, strict=True):
        actor, rollout = (batch.response(name, sample).double() for name in ("old_log_probs_G", "rollout_log_probs_G"))
        here = slice(begin, begin + len(actor))
        begin = here.stop
        inside = mask_G[here].clone()
        weights_G[here] = token_weights(actor - rollout, inside, config).float()
        kept = not rejected((actor - rollout)[inside], config)
        mask_G[here] &= kept
        tokens, counted = float(inside.sum()), weights_G[here][inside].double()
        row[:] = torch.tensor(
            [counted.sum(), (counted == 0).sum(), 0.0 if kept else tokens, not kept, tokens], dtype=torch.float64
        )
    if config.rejects:
        batch = batch.with_columns(loss_mask_G=mask_G)
    return batch.with_columns(token_weights_G=weights_G), sums_H5


def token_weights(log_ratio_T: torch.Tensor, inside_T: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    """The weights of one response's tokens, (T) like its log-ratios in nats; ``inside_T`` are those in the loss."""
    weights_T = torch.ones_like(log_ratio_T)
    highest = math.log(config.truncation)  # bounded before exp, which could overflow
    if config.weights == "token":
        weights_T = log_ratio_T.clamp(max=highest).exp()
    elif config.weights == "sequence":
        weights_T = weights_T * log_ratio_T[inside_T].sum().clamp(max=highest).exp()
    if config.token_bounds is not None:
        low, high = (math.log(bound) if bound else -math.inf for bound in config.token_bounds)
        weights_T = torch.where((log_ratio_T >= low) & (log_ratio_T <= high), weights_T, 0.0)
    return weights_T


def rejected(log_ratio_T: torch.Tensor, config: CorrectionConfig) -> bool:
    """Whether a response, by the log-ratios of its tokens in the loss, is too far from the actor; NaN is."""
    if not len(log_ratio_T):
        return False
    mean = float(log_ratio_T.mean())
    # k3 of KL(rollout || actor), from the rollout's samples
    k3 = float(k3_estimate(torch.zeros_like(log_ratio_T), log_ratio_T).mean())
    fits = config.max_k1 is None or abs(mean) <= config.max_k1
    fits &= config.max_k3 is None or k3 <= config.max_k3
    if config.geometric_mean_bounds is not None:
        low, high = (math.log(bound) if bound else -math.inf for bound in config.geometric_mean_bounds)
        fits &= low <= mean <= high
    return not fits


def correction_metrics(sums_N5: torch.Tensor) -> dict[str, float]:
    """Metrics of a step from the rows of :func:`correct` for all of its samples."""
    weight, zero, rejected_tokens, rejected_responses, tokens = sums_N5.sum(dim=0).tolist()
    return {
        "correction/weight_mean": weight / max(tokens, 1.0),
        "correction/zero_weight_share": zero / max(tokens, 1.0),
        "correction/rejected_token_share": rejected_tokens / max(tokens, 1.0),
        "correction/rejected_share": rejected_responses / max(len(sums_N5), 1),
    }
