"""A step's rewards, advantages, lengths and entropies, of all responses and by task; pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.algorithms.advantages import mixed_groups
from megatron_tlt.trainer.responses import ScoredResponse


def reward_spread(rewards: Sequence[float], group_size: int) -> dict[str, float]:
    """Standard deviation of the reward over all responses and within groups, minimum and maximum."""
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    return {
        "reward/std": float(np.std(rewards)),
        "reward/group_std": float(groups.std(axis=1, ddof=1).mean()),
        "reward/min": float(min(rewards)),
        "reward/max": float(max(rewards)),
    }


def length_metrics(lengths: Sequence[int], prompt_lengths: Sequence[int]) -> dict[str, float]:
    """Tokens per response and per prompt; ``prompt_lengths[i]`` belongs to response i."""
    found: dict[str, float | np.floating] = {
        "mean": np.mean(lengths),
        "median": np.median(lengths),
        "min": min(lengths),
        "max": max(lengths),
        "prompt_mean": np.mean(prompt_lengths),
        "prompt_min": min(prompt_lengths),
        "prompt_max": max(prompt_lengths),
    }
    return {f"length/{name}": float(value) for name, value in found.items()}


def advantage_metrics(advantages: Sequence[float], lengths: Sequence[int]) -> dict[str, float]:
    """Mean, standard deviation, minimum and maximum over response tokens; each token has its response's advantage."""
    values, weights = np.asarray(advantages, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    mean = np.average(values, weights=weights)
    variance = np.average((values - mean) ** 2, weights=weights)
    found = {"mean": mean, "std": np.sqrt(variance), "min": values.min(), "max": values.max()}
    return {f"advantage/{name}": float(value) for name, value in found.items()}


def task_metrics(tasks: Sequence[str], scored: Sequence[ScoredResponse], group_size: int) -> dict[str, float]:
    """Metrics ``task/<name>/*`` of every task that has a response.

    ``tasks[i]`` is the task of ``scored[i]``; ``group_size`` consecutive responses answer one problem.
    """
    metrics: dict[str, float] = {}
    for task in sorted(set(tasks)):
        own = [s for name, s in zip(tasks, scored, strict=True) if name == task]
        rewards = [s.reward.value for s in own]
        lengths = [s.length for s in own]
        found: dict[str, float | np.floating] = {
            "responses": len(own),
            "reward": np.mean(rewards),
            "correct": np.mean([s.reward.correct for s in own]),
            "extracted": np.mean([s.reward.extracted is not None for s in own]),
            "mixed_groups": mixed_groups(rewards, group_size),
            "length_mean": np.mean(lengths),
            "length_max": max(lengths),
            "truncated": np.mean([s.finish_reason == "length" for s in own]),
        }
        if any(s.said is not None for s in own):
            found["turns"] = np.mean([s.turns for s in own])
            found["said"] = sum(s.length if s.said is None else s.said for s in own) / sum(lengths)
            found["environment_errors"] = np.mean([s.reward.error is not None for s in own])
        metrics |= {f"task/{task}/{name}": float(value) for name, value in found.items()}
    return metrics


def entropy_metrics(tasks: Sequence[str], sums: Sequence[float], lengths: Sequence[float]) -> dict[str, float]:
    """Mean entropy per response token (nats) of the sampling policy, before the step's first update.

    ``sums[i]`` is the summed entropy of the ``lengths[i]`` tokens of response i that are in the loss mask, whose task
    is ``tasks[i]``. The distribution is that at the rollout's temperature, without top-p and top-k.
    """
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    for task, entropy, length in zip(tasks, sums, lengths, strict=True):
        totals[task] = totals.get(task, 0.0) + entropy
        counts[task] = counts.get(task, 0) + length
    metrics = {"rollout/entropy": sum(totals.values()) / max(sum(counts.values()), 1)}
    return metrics | {f"task/{task}/entropy": totals[task] / max(counts[task], 1) for task in sorted(totals)}
