"""Draft acceptance of a step, by draft position and by response length; pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.observe.metrics import LENGTH_CLASSES
from megatron_tlt.rollout.types import DraftStats


def length_classes(lengths: Sequence[int]) -> list[str]:
    """The length class of each response: its third when the step's responses are sorted by length.

    Responses of equal length have the same class.
    """
    ranked = sorted(lengths)
    count = len(ranked)
    bounds = [ranked[count * third // 3 - 1] if count * third // 3 else 0 for third in (1, 2)]
    return [LENGTH_CLASSES[sum(length > bound for bound in bounds)] for length in lengths]


def acceptance_metrics(
    lengths: Sequence[int], accounts: Sequence[DraftStats], drafter_version: int | None
) -> dict[str, float]:
    """Acceptance rate of each draft position, and acceptance length by class of response length.

    ``accounts[i]`` holds the draft counts of response i, which has ``lengths[i]`` tokens. ``drafter_version`` is the
    version of the drafter model that made the drafts; None without such a model.
    """
    total = sum(accounts, DraftStats())
    metrics = {
        f"speculation/accepted_at_{position}": accepted / total.num_drafts
        for position, accepted in enumerate(total.accepted_per_position, start=1)
        if total.num_drafts
    }
    if drafter_version is not None:
        metrics["speculation/drafter_version"] = float(drafter_version)
    classes = length_classes(lengths)
    for name in LENGTH_CLASSES:
        drafts = [account for account, found in zip(accounts, classes, strict=True) if found == name]
        if drafts:
            metrics[f"speculation/acceptance_length_{name}"] = sum(drafts, DraftStats()).acceptance_length
    return metrics
