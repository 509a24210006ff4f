"""Credit assignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_relative_advantages(
    rewards: Sequence[float], group_size: int, normalize_by_std: bool, epsilon: float = 1e-6
) -> list[float]:
    """Group-relative advantages (GRPO, DeepSeekMath 2402.03300, section 4.1.2).

    ``rewards`` holds ``group_size`` consecutive entries per prompt. Each response is compared with the mean of its
    group; ``normalize_by_std`` divides by the group's standard deviation (Dr. GRPO leaves this out). A group whose
    rewards are all equal gets zeros.

    Raises:
        ValueError: the number of rewards is not a multiple of ``group_size``.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group_size}")
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if normalize_by_std:
        centred = centred / (groups.std(axis=1, keepdims=True) + epsilon)
    return [float(value) for value in centred.reshape(-1)]
