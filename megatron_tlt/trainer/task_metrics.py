"""A step's rewards, lengths and entropies by task; pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.algorithms.advantages import mixed_groups
from megatron_tlt.trainer.experience import ScoredResponse


def reward_spread(rewards: Sequence[float]) -> dict[str, float]:
    """Standard deviation over all responses, lowest and highest reward."""
    return {
        "reward/std": float(np.std(rewards)),
        "reward/min": float(min(rewards)),
        "reward/max": float(max(rewards)),
    }


def task_metrics(tasks: Sequence[str], scored: Sequence[ScoredResponse], group_size: int) -> dict[str, float]:
    """``task/<name>/*`` of every task that has a response.

    ``tasks[i]`` is the task of ``scored[i]``; ``group_size`` consecutive responses answer one problem.
    """
    metrics: dict[str, float] = {}
    for task in sorted(set(tasks)):
        own = [s for name, s in zip(tasks, scored, strict=True) if name == task]
        rewards = [s.reward.value for s in own]
        lengths = [len(s.response.token_ids) for s in own]
        found: dict[str, float | np.floating] = {
            "responses": len(own),
            "reward": np.mean(rewards),
            "correct": np.mean([s.reward.correct for s in own]),
            "extracted": np.mean([s.reward.extracted is not None for s in own]),
            "mixed_groups": mixed_groups(rewards, group_size),
            "length_mean": np.mean(lengths),
            "length_max": max(lengths),
            "truncated": np.mean([s.response.finish_reason == "length" for s in own]),
        }
        metrics |= {f"task/{task}/{name}": float(value) for name, value in found.items()}
    return metrics


def entropy_metrics(tasks: Sequence[str], entropies: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean entropy per response token (nats) of the policy that sampled, before its first update of the step.

    ``entropies[i]`` holds those of the tokens of response i, whose task is ``tasks[i]``. The entropy is that of the
    distribution at the rollout's temperature, top-p and top-k left out.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for task, row in zip(tasks, entropies, strict=True):
        sums[task] = sums.get(task, 0.0) + sum(row)
        counts[task] = counts.get(task, 0) + len(row)
    metrics = {"rollout/entropy": sum(sums.values()) / max(sum(counts.values()), 1)}
    return metrics | {f"task/{task}/entropy": sums[task] / max(counts[task], 1) for task in sorted(sums)}
