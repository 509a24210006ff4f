"""Interface of an algorithm: the credit of each response, and the loss of an update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from megatron_tlt.algorithms.losses import Loss
from megatron_tlt.algorithms.registry import build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.errors import RunError


class Algorithm(ABC):
    """Base class of the algorithms, one per file; ``algorithm.name`` selects one by name or import path.

    The constructor of a subclass may take further arguments after ``config``, from ``algorithm.arguments``.
    """

    per_problem: ClassVar[bool] = False
    """Whether the advantages of a problem's responses depend on these alone; ``stream`` needs it."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        """One advantage per response; ``config.group_size`` consecutive rewards, all finite, answer one problem.

        ``lengths``: tokens of each response.
        """

    def loss(self) -> Loss:
        """The loss that a run's updates minimize. ``metrics.jsonl`` has its metrics as ``actor/<name>``."""
        return build_loss(self.config)

    def assign_credit(self, rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
        """:meth:`advantages`, checked.

        Raises:
            RunError: a reward or an advantage is not finite, or the number of advantages is wrong.
        """
        _check_finite("reward", rewards)
        advantages = [float(value) for value in self.advantages(rewards, lengths)]
        if len(advantages) != len(rewards):
            found = f"{len(advantages)} advantages for {len(rewards)} responses"
            raise RunError(f"algorithm.name: {self.config.name} returned {found}; allowed: one each")
        _check_finite("advantage", advantages)
        return advantages


def _check_finite(what: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise RunError(f"response {index}: {what} {value}; it must be finite")
