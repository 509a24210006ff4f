"""GRPO: a response's advantage is its reward relative to the other responses to the same problem."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.algorithms.advantages import group_relative_advantages
from megatron_tlt.algorithms.algorithm import Algorithm


class Grpo(Algorithm):
    """Group-relative policy optimization (DeepSeekMath 2402.03300, section 4.1).

    Credit: the reward minus the group's mean, divided by its standard deviation with ``normalize_by_std``; the same
    for every token of the response. GSPO, CISPO and Dr. GRPO have this credit, too, with other values of the config.
    """

    per_problem = True

    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        return group_relative_advantages(rewards, self.config.group_size, self.config.normalize_by_std)
