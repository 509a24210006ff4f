"""Credit assignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.errors import RunError


def group_relative_advantages(
    rewards: Sequence[float], group_size: int, normalize_by_std: bool, epsilon: float = 1e-6
) -> list[float]:
    """Group-relative advantages (GRPO, DeepSeekMath 2402.03300, section 4.1.2).

    ``rewards`` holds ``group_size`` consecutive entries per prompt. Each response is compared with the mean of its
    group; ``normalize_by_std`` divides by the group's standard deviation (Dr. GRPO leaves this out). A group whose
    rewards are all equal gets zeros.

    Raises:
        ValueError: the number of rewards is not a multiple of ``group_size``.
        RunError: a reward is not finite.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group_size}")
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    if not np.isfinite(groups).all():
        index = int(np.flatnonzero(~np.isfinite(groups))[0])
        raise RunError(f"response {index}: reward {rewards[index]}; a finite one is needed")
    # equal rewards may differ from their mean by rounding
    equal = np.ptp(groups, axis=1, keepdims=True) == 0
    centred = np.where(equal, 0.0, groups - groups.mean(axis=1, keepdims=True))
    if normalize_by_std:
        centred = centred / (groups.std(axis=1, keepdims=True) + epsilon)
    return [float(value) for value in centred.reshape(-1)]


def mixed_groups(rewards: Sequence[float], group_size: int) -> float:
    """Share of groups whose rewards differ: only these have a gradient. Equal rewards may have a standard deviation."""
    return float(np.mean(np.ptp(np.asarray(rewards, dtype=np.float64).reshape(-1, group_size), axis=1) > 0))
