"""The interface of all tuners, which choose the strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from megatron_tlt.speculation.strategy import BudgetsOf, StepRecord, Strategy


class Tuner(Protocol):
    """Chooses a strategy for the running batch and learns from measured steps; deterministic given its seed."""

    @property
    def strategies(self) -> Sequence[Strategy]:
        """All strategies it can choose."""

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        """Return the strategy for the next steps of ``batch`` requests; "off" above the maximum batch.

        ``budgets`` returns the requests' draft budgets under a strategy; None: each request may have all drafts.
        """

    def observe(self, step: StepRecord) -> None:
        """Learn from a step, even if its strategy was not chosen by this tuner."""

    def drafter_changed(self, drafter: str) -> None:
        """Discount past measurements of this drafter's strategies: its weights have changed."""

    def withhold(self, drafters: Collection[str]) -> None:
        """Stop choosing strategies of these drafters; replaces the previous set. Not part of the state."""

    def state(self) -> dict[str, Any]:
        """The complete learned state as JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of ``state()``.

        Raises:
            ValueError: the state is not one of such a tuner over these strategies.
        """
