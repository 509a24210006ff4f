"""What became of a step's drafts, by position and by how long the responses were; pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.observe.metrics import LENGTH_CLASSES
from megatron_tlt.rollout.types import DraftStats


def length_classes(lengths: Sequence[int]) -> list[str]:
    """The class of each response: which third of the step's responses it is in, by length; equal lengths share one."""
    ranked = sorted(lengths)
    count = len(ranked)
    bounds = [ranked[count * third // 3 - 1] if count * third // 3 else 0 for third in (1, 2)]
    return [LENGTH_CLASSES[sum(length > bound for bound in bounds)] for length in lengths]


def acceptance_metrics(
    lengths: Sequence[int], accounts: Sequence[DraftStats], drafter_version: int | None
) -> dict[str, float]:
    """Shares of drafts accepted at each position, and acceptance lengths by class of response length.

    ``accounts[i]`` is that of response i, of ``lengths[i]`` tokens.

    ``drafter_version`` is that of the drafter model that made the drafts; None where there was none.
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
