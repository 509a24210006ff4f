"""Interface that an engine calls before and after each step to choose the speculation strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatron_tlt.speculation.strategy import StepRecord, Strategy


class StrategyChooser(Protocol):
    """Chooses a strategy before each engine step and observes the result; called on the engine's first rank only."""

    def next(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, Mapping[str, int] | None]:
        """Choose the strategy to draft under from this step on, and lower draft limits of single requests.

        Args:
            batch: number of requests to draft for; equals ``len(requests)`` except before the first step.
            requests: tokens generated so far, by id of each running request.

        Returns:
            The strategy and the budgets by request id; other requests get the strategy's ``num_tokens``.
        """

    def observe(self, step: StepRecord) -> None:
        """Process the record of a finished step."""
