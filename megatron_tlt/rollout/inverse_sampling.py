"""Sampling of tokens by inversion of the distribution function, and verification of drafts, in plain tensor operations.

One uniform number decides a token. The number of operations depends on neither the requests nor the vocabulary, and
none waits for the device. Suffixes: B requests, K most drafts of a request, T drafts of all requests, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_BLOCKS = (512, 256, 128)
_BELOW_ONE = 1.0 - 2.0**-53


def sample_by_inversion(weights_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Ids (B) of which each has a probability proportional to its weight, in double precision.

    An id of weight 0 is never returned, unless its row has no others. Two searches, over blocks and within one, replace
    a cumulative sum over the vocabulary, which a GPU computes with one thread block per row.

    Args:
        weights_BV: weights of at least 0.
        uniforms_B: float64, in [0, 1).
    """
    width = weights_BV.shape[1]
    size = next((size for size in _BLOCKS if width % size == 0), _BLOCKS[0])
    if width % size:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, -width % size))
    blocks = weights_BV.view(len(weights_BV), -1, size)
    masses = blocks.sum(dim=-1, dtype=torch.float64)
    sums, levels, block_B1 = _find(masses, uniforms_B[:, None])
    mass_B1 = masses.gather(1, block_B1)
    rest_B1 = (levels - sums.gather(1, block_B1)) / mass_B1 + 1.0
    chosen = blocks.take_along_dim(block_B1[:, :, None], dim=1)[:, 0].double()
    *_, within_B1 = _find(chosen, rest_B1.clamp_(0.0, _BELOW_ONE))
    # a row without mass, or of NaN, may end in the padding
    return torch.add(within_B1, block_B1, alpha=size)[:, 0].clamp_(max=width - 1)


def _find(masses: torch.Tensor, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The columns (rows, 1) where the sums of ``masses`` (rows, columns) exceed ``fractions`` (rows, 1) of their total.

    Returns:
        Sums (rows, columns), levels (rows, 1), columns (rows, 1). A level is below the total, as fractions are below 1.
    """
    sums = masses.cumsum(dim=-1)
    levels = fractions * sums[:, -1:]
    return sums, levels, torch.searchsorted(sums, levels, right=True).clamp_(max=masses.shape[1] - 1)


def draft_slots(counts_B: np.ndarray) -> np.ndarray:
    """Where each request's drafts are among T, those of a request side by side: (B, K + 1), from 0 to T - 1.

    The columns from its count on have no meaning.
    """
    starts = counts_B.cumsum() - counts_B
    return np.minimum(starts[:, None] + np.arange(counts_B.max() + 1), counts_B.sum() - 1)


@dataclass(frozen=True)
class Drafts:
    """T > 0 drafts to verify.

    Attributes:
        tokens_T: -1 is padding, which is never accepted.
        probs_TV: the distributions that they were drawn from; None if all are certain.
        counts_B: number of each request's drafts.
        slots_BL: see ``draft_slots``; L is K + 1.
    """

    tokens_T: torch.Tensor
    probs_TV: torch.Tensor | None
    counts_B: torch.Tensor
    slots_BL: torch.Tensor


def verify(
    drafts: Drafts,
    target_TV: torch.Tensor,
    last_B: torch.Tensor,
    greedy_B: torch.Tensor | None,
    verify_BK: torch.Tensor,
    replace_B: torch.Tensor,
) -> torch.Tensor:
    """Speculative sampling (Leviathan et al., 2023): tokens (B, L), int32, -1 after each request's last.

    A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced by a sample of
    max(p - q, 0), and a request whose drafts were all accepted gets ``last_B``.

    Args:
        drafts: the drafts, and q.
        target_TV: logits of p, after temperature and filters.
        last_B: the target's token after all drafts of a request.
        greedy_B: requests whose tokens are the target's most likely ones; None if there are none.
        verify_BK: uniform numbers of the acceptances; infinite where a request has no draft.
        replace_B: uniform numbers of the replacements.
    """
    tokens_T, slots_BL, probs_TV = drafts.tokens_T.long(), drafts.slots_BL, drafts.probs_TV
    slots_BK = slots_BL[:, :-1]
    real_T1 = tokens_T[:, None] >= 0
    ids_T1 = tokens_T[:, None].clamp(min=0)
    target_TV, logits_TV = target_TV.softmax(dim=-1, dtype=torch.float32), target_TV
    found_T1 = target_TV.gather(1, ids_T1)
    bounds_BK = verify_BK
    if probs_TV is not None:
        bounds_BK = verify_BK * probs_TV.gather(1, ids_T1)[slots_BK, 0]
    right_BK = (found_T1 * real_T1)[slots_BK, 0] > bounds_BK
    if greedy_B is not None:
        best_T = logits_TV.argmax(dim=-1)
        likeliest_BK = (best_T == tokens_T)[slots_BK] & verify_BK.isfinite()
        right_BK = torch.where(greedy_B[:, None], likeliest_BK, right_BK)
    accepted_B1 = right_BK.cumprod(dim=1).sum(dim=1, keepdim=True)

    first_B = slots_BL.gather(1, accepted_B1)[:, 0]  # the rejected draft, if there is one
    target_BV = target_TV[first_B]
    if probs_TV is not None:
        rest_BV = torch.addcmul(target_BV, probs_TV[first_B], real_T1[first_B], value=-1).clamp_(min=0.0)
    else:
        rest_BV = target_BV.scatter(1, ids_T1[first_B], (found_T1 * ~real_T1)[first_B])
    # p and q may be equal up to rounding where a draft is rejected
    rest_BV = torch.where(rest_BV.any(dim=-1, keepdim=True), rest_BV, target_BV)
    final_B = sample_by_inversion(rest_BV, replace_B)
    if greedy_B is not None:
        final_B = torch.where(greedy_B, best_T[first_B], final_B)
    final_B = torch.where(accepted_B1[:, 0] == drafts.counts_B, last_B, final_B)
    columns_L = torch.arange(slots_BL.shape[1], device=tokens_T.device)
    after_BL = torch.where(columns_L == accepted_B1, final_B[:, None], -1)
    return torch.where(columns_L < accepted_B1, tokens_T[slots_BL], after_BL).int()
