"""The metrics of a rollout's responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megatron_tlt.algorithms.advantages import mixed_groups
from megatron_tlt.rollout.types import DraftStats
from megatron_tlt.trainer.acceptance import acceptance_metrics
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.task_metrics import length_metrics, reward_spread, task_metrics


def rollout_metrics(
    scored: Sequence[ScoredResponse],
    tasks: Sequence[str],
    group: int,
    times: Sequence[tuple[float, float, float]],
    decoded: int,
    drafter_version: int | None,
) -> dict[str, float]:
    """Means over the responses of a step.

    Args:
        scored: the responses, grouped by problem.
        tasks: the task of each.
        group: responses to each problem.
        times: seconds of rollout, waiting and rewards of each rank.
        decoded: response tokens of the rollout, used or not.
        drafter_version: of the engines' drafter.
    """
    slowest = max(row[0] for row in times)
    lengths, accounts = [s.length for s in scored], [s.draft for s in scored]
    drafts = sum(accounts, DraftStats())
    rewards = [s.reward.value for s in scored]
    return {
        "time/rollout": slowest,
        "time/idle": float(np.mean([row[1] for row in times])),
        "time/reward": max(row[2] for row in times),
        "rollout/tokens_per_s": decoded / slowest,
        "reward/mean": float(np.mean(rewards)),
        "reward/correct": float(np.mean([s.reward.correct for s in scored])),
        "reward/mixed_groups": mixed_groups(rewards, group),
        "reward/extracted": float(np.mean([s.reward.extracted is not None for s in scored])),
        "reward/verifier_errors": float(sum(s.reward.error is not None for s in scored)),
        "reward/verifier_error_share": float(np.mean([s.reward.error is not None for s in scored])),
        "reward/late": float(sum(s.reward.late for s in scored)),
        "length/truncated": Counter(s.finish_reason for s in scored)["length"] / len(scored),
        **length_metrics(lengths, [s.prompt_length for s in scored]),
        **reward_spread(rewards, group),
        **task_metrics(tasks, scored, group),
        "speculation/acceptance_length": drafts.acceptance_length,
        "speculation/draft_tokens": float(drafts.num_draft_tokens),
        "speculation/accepted_tokens": float(drafts.num_accepted_tokens),
        **acceptance_metrics(lengths, accounts, drafter_version),
    }
