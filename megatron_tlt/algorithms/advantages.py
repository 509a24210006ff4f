"""Credit assignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.errors import RunError


def group_relative_advantages(
    rewards: Sequence[float], group_size: int, normalize_by_std: bool, epsilon: float = 1e-6
) -> list[float]:
    """Group-relative advantages (GRPO, DeepSeekMath 2402.03300, section 4.1.2).

    ``rewards`` has ``group_size`` consecutive entries per prompt. The advantage is the reward minus the mean of its
    group; ``normalize_by_std`` divides by the group's standard deviation, which Dr. GRPO omits. A group with equal
    rewards gets zeros.

    Raises:
        ValueError: the number of rewards is not a multiple of ``group_size``.
        RunError: a reward is not finite.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group_size}")
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    if not np.isfinite(groups).all():
        index = int(np.flatnonzero(~np.isfinite(groups))[0])
        raise RunError(f"response {index}: reward {rewards[index]}; it must be finite")
    # due to rounding, equal rewards may differ from their mean
    equal = np.ptp(groups, axis=1, keepdims=True) == 0
    centred = np.where(equal, 0.0, groups - groups.mean(axis=1, keepdims=True))
    if normalize_by_std:
        centred = centred / (groups.std(axis=1, keepdims=True) + epsilon)
    return [float(value) for value in centred.reshape(-1)]


def mixed_groups(rewards: Sequence[float], group_size: int) -> float:
    """Fraction of groups whose rewards differ; only these contribute a gradient.

    Compares rewards exactly: due to rounding, the standard deviation of equal rewards may be nonzero.
    """
    return float(np.mean(np.ptp(np.asarray(rewards, dtype=np.float64).reshape(-1, group_size), axis=1) > 0))


def leave_one_out_advantages(rewards: Sequence[float], group_size: int) -> list[float]:
    """The reward minus the mean of the other rewards of its group (RLOO, 2402.14740, section 2.2).

    Raises:
        ValueError: the number of rewards is not a multiple of ``group_size``.
        RunError: a reward is not finite.
    """
    centred = group_relative_advantages(rewards, group_size, normalize_by_std=False)
    return [group_size / (group_size - 1) * value for value in centred]


def whitened(values: Sequence[float], lengths: Sequence[int], epsilon: float = 1e-8) -> list[float]:
    """Values with mean 0 and variance 1 over the tokens of the batch: each counts ``length`` times.

    The variance is the unbiased one, as in verl's ``masked_whiten``. A batch of equal values gets zeros.
    """
    value, weight = np.asarray(values, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    tokens = weight.sum()
    if np.ptp(value) == 0 or tokens < 2:
        return [0.0] * len(value)
    centred = value - (value * weight).sum() / tokens
    variance = (centred**2 * weight).sum() / (tokens - 1)
    return [float(entry) for entry in centred / np.sqrt(variance + epsilon)]
