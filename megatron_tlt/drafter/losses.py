"""The drafter's losses, per token and as sums over a pack; each token's loss is that of one draft.

Shapes: R rows (drafts whose prediction is in a response), H hidden size, V vocabulary, D draft vocabulary, M compared
categories (V or D). Over D, the target's probabilities p sum to less than 1 if the target emits other tokens. The
drafter has q = 0 for those, and they do not count in a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_tlt.config.drafter import DrafterLossConfig
from megatron_tlt.drafter.model import project

DistributionLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(target's log-probs (R, M), drafter's log-probs (R, M)) -> losses (R)."""


def _weighted(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``sum p * values`` where p > 0: categories excluded by the target have infinite values."""
    return torch.where(p > 0, p * values.masked_fill(p == 0, 0.0), 0.0).sum(-1)


def cross_entropy(log_p_RM: torch.Tensor, log_q_RM: torch.Tensor) -> torch.Tensor:
    """EAGLE (2401.15077, section 4.1): ``-sum p log q``."""
    return -_weighted(log_p_RM.exp(), log_q_RM)


def kl_divergence(log_p_RM: torch.Tensor, log_q_RM: torch.Tensor) -> torch.Tensor:
    """NexSpec (2510.26475): ``KL(p || q) = sum p (log p - log q)``."""
    p = log_p_RM.exp()
    return _weighted(p, log_p_RM.masked_fill(p == 0, 0.0)) - _weighted(p, log_q_RM)


def total_variation(log_p_RM: torch.Tensor, log_q_RM: torch.Tensor) -> torch.Tensor:
    """``1 - sum min(p, q)``: the probability that a draft sampled from q is rejected (Bebop, 2606.12370).

    Its gradient vanishes where p and q hardly overlap, so use it after warming up the drafter with another loss.
    """
    return 1.0 - torch.minimum(log_p_RM.exp(), log_q_RM.exp()).sum(-1)


LOSSES: dict[str, DistributionLoss] = {"eagle": cross_entropy, "kl": kl_divergence, "tv": total_variation}
"""Losses by ``drafter.loss.name``."""


@dataclass(frozen=True)
class Drafted:
    """Drafts and the target's states for the same positions.

    Attributes:
        head_input_RH: input of the LM head.
        features_RH: the feature passed to the next step.
        weights_R: weight of each row's loss.
        target_hidden_RH: the target's state after its final norm, which EAGLE's feature predicts.
        target_log_sum_R: ``log sum exp`` of the target's logits over its whole vocabulary. Needed with a draft
            vocabulary, because only the logits of that vocabulary are computed here.
    """

    head_input_RH: torch.Tensor
    features_RH: torch.Tensor
    weights_R: torch.Tensor
    target_hidden_RH: torch.Tensor
    target_log_sum_R: torch.Tensor | None = None


@torch.no_grad()
def log_sums(hidden_RH: torch.Tensor, head_VH: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """``log sum exp`` of the LM head's logits at each state, (R), computed ``chunk_rows`` states at a time."""
    return torch.cat([project(rows, head_VH).logsumexp(-1) for rows in hidden_RH.split(chunk_rows)])


def _chunk_loss(
    distribution_loss: DistributionLoss,
    head_input_RH: torch.Tensor,
    head_DH: torch.Tensor,
    target_hidden_RH: torch.Tensor,
    target_head: torch.Tensor,
    target_log_sum_R: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and acceptance probabilities of some rows, each (R); no tensor of width V outlives this call.

    ``target_head`` holds the rows of the draft vocabulary, (D, H).
    """
    logits_RD = project(head_input_RH, head_DH)
    drafted_R1 = logits_RD.detach().argmax(-1, keepdim=True)
    with torch.no_grad():
        target_RD = project(target_hidden_RH, target_head)
        log_p_RD = target_RD.log_softmax(-1) if target_log_sum_R is None else target_RD - target_log_sum_R[:, None]
        accepted_R = log_p_RD.gather(-1, drafted_R1)[:, 0].exp()
    return distribution_loss(log_p_RD, logits_RD.log_softmax(-1)), accepted_R


def draft_loss(
    config: DrafterLossConfig,
    regression_weight: float,
    drafted: Drafted,
    head_DH: torch.Tensor,
    target_head_VH: torch.Tensor,
    chunk_rows: int,
    draft_ids_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of all rows' losses, and sums to log (not weighted by ``weights_R``).

    ``accepted`` sums the target's probabilities of the drafter's likeliest tokens: the expected number of these drafts
    that a sampling target accepts.

    ``regression_weight * SmoothL1(feature, target's hidden) + distribution_weight * loss(p, q)`` (TLT, 2511.16665). The
    head processes ``chunk_rows`` rows at a time and recomputes them in the backward pass, so (R, V) is never stored.
    Its rows are the logits of the target's tokens ``draft_ids_D``, or of all tokens.
    """
    rows = len(drafted.weights_R)
    target_head = target_head_VH
    if draft_ids_D is not None:
        assert drafted.target_log_sum_R is not None, "a draft vocabulary's probabilities need the whole one's sum"
        target_head = target_head_VH[draft_ids_D]
    log_sum_R = drafted.target_log_sum_R
    loss = drafted.head_input_RH.new_zeros((), dtype=torch.float32)
    distribution_sum, regression_sum, accepted_sum = loss.detach(), loss.detach(), loss.detach()
    for low in range(0, rows, chunk_rows):
        high = min(low + chunk_rows, rows)
        losses_R, accepted_R = checkpoint(
            _chunk_loss,
            LOSSES[config.name],
            drafted.head_input_RH[low:high],
            head_DH,
            drafted.target_hidden_RH[low:high],
            target_head,
            None if log_sum_R is None else log_sum_R[low:high],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        loss = loss + config.distribution_weight * (losses_R * drafted.weights_R[low:high]).sum()
        distribution_sum = distribution_sum + losses_R.detach().sum()
        accepted_sum = accepted_sum + accepted_R.sum()
    if regression_weight:
        errors_R = F.smooth_l1_loss(
            drafted.features_RH.float(), drafted.target_hidden_RH.float(), reduction="none"
        ).mean(-1)
        loss = loss + regression_weight * (errors_R * drafted.weights_R).sum()
        regression_sum = errors_R.detach().sum()
    return loss, {
        "distribution_loss": distribution_sum,
        "regression_loss": regression_sum,
        "accepted": accepted_sum,
    }


def reward_weight(config: DrafterLossConfig, reward: float) -> float:
    """The weight of a response's tokens: 1, or its reward normalised to 0..1 and clipped (NexSpec, 2510.26475).

    The bounds come from the configuration, not the batch, so that a response's weight does not depend on the ranks.
    """
    if not config.reward_weighting:
        return 1.0
    normalised = (reward - config.reward_low) / (config.reward_high - config.reward_low)
    return min(1.0, max(config.reward_floor, normalised))
