"""Dr. GRPO: GRPO without its biases towards very easy or hard problems and towards long wrong responses."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.algorithms.advantages import group_relative_advantages
from megatron_tlt.algorithms.grpo import Grpo


class DrGrpo(Grpo):
    """Dr. GRPO (2503.20783, section 3.2).

    Credit: the reward minus the group's mean, never divided by the standard deviation. Loss: GRPO's loss with equal
    weight for every token (``loss_aggregation: token_mean``). The sum is divided by the tokens of the mini-batch, not
    by the paper's constant.
    """

    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return group_relative_advantages(rewards, self.config.group_size, normalize_by_std=False)
