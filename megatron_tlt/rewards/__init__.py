"""Verifiers, and the pool of processes that runs them during decoding."""

from megatron_tlt.rewards.pool import PoolCounts, RewardPool
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rewards.verifiers import VERIFIERS, verifiers_of

__all__ = ["VERIFIERS", "PoolCounts", "Reward", "RewardPool", "verifiers_of"]
