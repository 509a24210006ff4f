"""What training the drafter was worth: the run's first drafter against its newest, on the same responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tlt.drafter import Acceptance, DraftModel, Entry, teacher_forced_acceptance
from megatron_tlt.platform.collectives import all_gather_data

HELD_TOKENS = 8192
"""Tokens per rank that the drafters are compared on, at most, unless a single response is longer."""


def held(entries: Sequence[Entry], entry: Entry) -> list[Entry]:
    """``entries`` with one more, where it leaves them within ``HELD_TOKENS``."""
    total = sum(one.length for one in entries) + entry.length
    return [*entries, entry] if not entries or total <= HELD_TOKENS else list(entries)


@dataclass(frozen=True)
class _Counts:
    """Of one rank: its drafter's version, chains of drafts, and drafts accepted in all."""

    version: int
    chains: int
    frozen: float
    adapted: float


def compare_with_frozen(
    frozen: DraftModel, adapted: DraftModel, version: int, entries: Sequence[Entry], depth: int, max_tokens: int
) -> dict[str, float]:
    """Teacher-forced greedy acceptance lengths of both, over the ranks whose drafter is the newest; collective.

    That is tokens per verification where a chain of ``depth`` drafts starts at every token of the responses
    (``teacher_forced_acceptance``); sampled rollouts accept otherwise, of both alike.

    Args:
        frozen: the drafter as it was when the run started, with the target's embedding and head of now.
        adapted: the drafter that is trained; on ranks in the bubble it may be newer than on others.
        version: of ``adapted``, in optimizer steps.
        entries: this rank's responses, which neither was trained on; there may be none.
        max_tokens: of a pack.

    Returns:
        Metrics; empty where no rank has a response.
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
