"""Who chooses the strategy: the interface that every tuner has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from megatron_tlt.speculation.strategy import BudgetsOf, StepRecord, Strategy


class Tuner(Protocol):
    """Chooses a strategy for the running batch and learns from what came of it; deterministic given its seed."""

    @property
    def strategies(self) -> Sequence[Strategy]:
        """All that it may choose."""

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        """The strategy for the next steps of a batch of this many requests; "off" above the largest batch.

        ``budgets`` are the requests' draft budgets under each strategy; None: each request may have all drafts.
        """

    def observe(self, step: StepRecord) -> None:
        """Learn from a step; also from ones whose strategy it did not choose."""

    def drafter_changed(self, drafter: str) -> None:
        """Strategies of this drafter have new weights: what they gained says little of what they will."""

    def withhold(self, drafters: Collection[str]) -> None:
        """From now on choose no strategy of these drafters, whatever was withheld before; no part of the state."""

    def state(self) -> dict[str, Any]:
        """All that it has learnt, as JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result.

        Raises:
            ValueError: it is not one of such a tuner over these strategies.
        """
