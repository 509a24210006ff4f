"""RLOO: the baseline of a response is the mean reward of the others to the same problem."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.algorithms.advantages import leave_one_out_advantages
from megatron_tlt.algorithms.algorithm import Algorithm


class Rloo(Algorithm):
    """REINFORCE leave-one-out (2402.14740, section 2.2): G / (G - 1) times the reward minus the group's mean."""

    per_problem = True

    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        return leave_one_out_advantages(rewards, self.config.group_size)
