"""Benefit of drafter training: acceptance of the run's first and newest drafter on the same responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tlt.drafter import Acceptance, DraftModel, Entry, teacher_forced_acceptance
from megatron_tlt.platform.collectives import all_gather_data

HELD_TOKENS = 8192
"""Maximum number of tokens per rank for the comparison, unless a single response is longer."""


def held(entries: Sequence[Entry], entry: Entry) -> list[Entry]:
    """``entries``, extended by ``entry`` if the total stays within ``HELD_TOKENS``."""
    total = sum(one.length for one in entries) + entry.length
    return [*entries, entry] if not entries or total <= HELD_TOKENS else list(entries)


@dataclass(frozen=True)
class _Counts:
    """One rank's drafter version, number of draft chains, and total accepted drafts of both drafters."""

    version: int
    chains: int
    frozen: float
    adapted: float


def compare_with_frozen(
    frozen: DraftModel, adapted: DraftModel, version: int, entries: Sequence[Entry], depth: int, max_tokens: int
) -> dict[str, float]:
    """Teacher-forced greedy acceptance lengths of both drafters, over the ranks with the newest drafter; collective.

    The acceptance length is the number of tokens per verification if a chain of ``depth`` drafts starts at every
    response token (``teacher_forced_acceptance``). Sampled rollouts have other acceptance lengths, for both drafters.

    Args:
        frozen: the drafter at the start of the run, with the target's current embedding and head.
        adapted: the trained drafter; ranks that trained in idle time may have a newer one than others.
        version: of ``adapted``, in optimizer steps.
        entries: this rank's responses, possibly none; neither drafter was trained on them.
        max_tokens: bound of a packed row.

    Returns:
        Metrics; empty if no rank has a response.
    """

    def accepted(model: DraftModel) -> Acceptance:
        return teacher_forced_acceptance(model, entries, depth, max_tokens)

    mine = _Counts(version, 0, 0.0, 0.0)
    if entries:
        before, now = accepted(frozen), accepted(adapted)
        mine = _Counts(version, now.chains, before.chains * before.mean_accepted, now.chains * now.mean_accepted)
    ranks = [one for one in all_gather_data(mine, _Counts) if one.chains]
    ranks = [one for one in ranks if one.version == max(rank.version for rank in ranks)]
    chains = sum(one.chains for one in ranks)
    if not chains:
        return {}
    return {
        "drafter/frozen_acceptance_length": 1.0 + sum(one.frozen for one in ranks) / chains,
        "drafter/adapted_acceptance_length": 1.0 + sum(one.adapted for one in ranks) / chains,
    }
