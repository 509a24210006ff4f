"""Who chooses the strategy: the interface that every tuner has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_tlt.speculation.strategy import StepObservation, Strategy


class Tuner(Protocol):
    """Chooses a strategy for the running batch and learns from what came of it; deterministic given its seed."""

    @property
    def strategies(self) -> Sequence[Strategy]:
        """All that it may choose."""

    def choose(self, batch: int) -> Strategy:
        """The strategy for the next steps of a batch of this many requests."""

    def observe(self, step: StepObservation) -> None:
        """Learn from a step; also from ones whose strategy it did not choose."""

    def drafter_changed(self, drafter: str) -> None:
        """Strategies of this drafter have new weights: what they gained says little of what they will."""

    def state(self) -> dict[str, Any]:
        """All that it has learnt, as JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result.

        Raises:
            ValueError: it is not one of such a tuner over these strategies.
        """
