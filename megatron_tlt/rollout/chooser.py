"""Who chooses the strategy while an engine generates: the interface the engine calls around each of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatron_tlt.speculation.strategy import StepRecord, Strategy


class StrategyChooser(Protocol):
    """Chooses before each engine step and sees what came of it; of an engine's ranks, the first one's is asked."""

    def next(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, Mapping[str, int] | None]:
        """The strategy to draft under from this step on, and drafts per request where these are fewer.

        Args:
            batch: requests that the next drafts are for, ``len(requests)`` but before the first step.
            requests: tokens generated so far, by the id of each running request.

        Returns:
            Its budgets hold for the requests that they name, the strategy's ``num_tokens`` for others.
        """

    def observe(self, step: StepRecord) -> None:
        """A step has ended."""
