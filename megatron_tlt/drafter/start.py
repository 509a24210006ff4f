"""Calibration of a drafter initialized from its target: it repeats the target's feature, scaled to fit data.

A draft vocabulary is chosen too: the tokens that the target most likely emits on that data.

A drafter with zero output projections passes the feature through. The loss of the LM head's output is convex in the
feature's scale and is ln V at scale 0, so a scale chosen on data is never worse than uniform guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_tlt.drafter.model import DraftModel, project
from megatron_tlt.drafter.packing import Pack

#: Candidate scales of the feature. 0 guesses uniformly: its loss is ln V.
SCALES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.125, 0.0625, 0.0)
#: The scale is chosen on every 8th position of each sequence, however sequences are packed and distributed.
_EVERY = 8
_CHUNK_ROWS = 1024
_SMALLEST_RMS = 1e-6


@torch.no_grad()
def calibrate_start(
    model: DraftModel, packs: Sequence[Pack], reduce: Callable[[Sequence[torch.Tensor]], None]
) -> Exception | None:
    """Calibrate ``model`` on data; a repeated call starts afresh.

    Args:
        model: untrained, from ``drafter_from_target``.
        packs: this rank's data; may be empty.
        reduce: sums tensors over all ranks, in place. All ranks call this together and choose the same scale.

    Returns:
        The exception on this rank, if any; the rank takes part in both reductions all the same.
    """
    device = next(model.parameters()).device
    error: Exception | None = None
    if model.draft_ids_D is not None:
        weights_V = torch.zeros(int(model.config.vocab_size), dtype=torch.float64, device=device)
        try:
            for pack in packs:
                weights_V += _said(model, pack.to(device))
        except Exception as caught:  # any exception: the other ranks wait in the reduction
            error = caught
        reduce([weights_V])
        model.choose_vocabulary(weights_V)
    sums = torch.zeros(model.entry_size + 1, dtype=torch.float64, device=device)
    losses = torch.zeros(len(SCALES), dtype=torch.float64, device=device)
    for pack in packs:
        sums[:-1] += pack.hidden_SE.to(device).double().square().sum(0)
        sums[-1] += len(pack.hidden_SE)
    reduce([sums])
    if not sums[-1]:
        return None
    rms_E = (sums[:-1] / sums[-1]).sqrt().clamp(min=_SMALLEST_RMS).float()
    model.set_start(rms_E, 1.0)
    try:
        for pack in packs:
            losses += _first_draft_losses(model, pack.to(device))
    except Exception as caught:  # as above
        error = caught
    reduce([losses])
    model.set_start(rms_E, SCALES[int(losses.nan_to_num(torch.inf).argmin())])
    return error


def _said(model: DraftModel, pack: Pack) -> torch.Tensor:
    """Expected count of each token after some of the positions: the sum of the target's probabilities, (V)."""
    rows = pack.rows(0)
    positions_T = torch.cat([torch.arange(length, device=rows.device) for length in pack.lengths])
    rows = rows[positions_T[rows] % _EVERY == 0]
    total = torch.zeros(int(model.config.vocab_size), dtype=torch.float64, device=pack.hidden_SE.device)
    for some in rows.split(_CHUNK_ROWS):
        hidden_RH = pack.hidden_SE[pack.anchors_T[some] + 1, -int(model.config.hidden_size) :]
        total += project(hidden_RH, model.shared.head).softmax(-1).sum(0)
    return total


def _first_draft_losses(model: DraftModel, pack: Pack) -> torch.Tensor:
    """The summed cross entropies of some of the first drafts, for each scale.

    The logits are proportional to the scale, so one pass gives all losses:
    ``-sum p log q = (sum p) log sum exp(s z) - s sum p z``.
    """
    features, context = model.start(pack.hidden_SE[pack.anchors_T, : model.feature_size].float(), pack.lengths)
    head_input_TH, _ = model(pack.inputs(0), features, context)
    drafted = pack.rows(0)
    total = torch.zeros(len(SCALES), dtype=torch.float64, device=head_input_TH.device)
    for rows in drafted[context.positions_T[drafted] % _EVERY == 0].split(_CHUNK_ROWS):
        hidden_RH = pack.hidden_SE[pack.anchors_T[rows] + 1, -int(model.config.hidden_size) :]
        p_RD = project(hidden_RH, model.shared.head).softmax(-1)
        if model.draft_ids_D is not None:
            p_RD = p_RD[:, model.draft_ids_D]
        logits_RD = project(head_input_TH[rows], model.head_DH)
        mass_R, mean_R = p_RD.sum(-1), (p_RD * logits_RD).sum(-1)
        for i, scale in enumerate(SCALES):
            total[i] += (mass_R * (scale * logits_RD).logsumexp(-1) - scale * mean_R).double().sum()
    return total
