"""REINFORCE without a baseline, and REINFORCE++ with one that is the mean over the batch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.algorithms.advantages import group_relative_advantages, whitened
from megatron_tlt.algorithms.algorithm import Algorithm


class Reinforce(Algorithm):
    """The reward itself (Williams 1992)."""

    per_problem = True

    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        return rewards


class ReinforcePlusPlus(Algorithm):
    """Rewards whitened over all tokens of the batch (REINFORCE++, 2501.03262, section 3)."""

    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        return whitened(rewards, lengths)


class ReinforcePlusPlusBaseline(Algorithm):
    """The reward minus its group's mean, whitened over all tokens of the batch (2501.03262, section 3)."""

    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        centred = group_relative_advantages(rewards, self.config.group_size, normalize_by_std=False)
        return whitened(centred, lengths)
