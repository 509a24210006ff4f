"""Decides whether to speculate: only after the running batch has been small for some steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ElasticGate:
    """Opens after ``patience`` consecutive steps with at most ``threshold`` requests (TLT, adaptive rollout engine).

    Closes at the first batch above ``threshold + hysteresis``; in between its state does not change.
    """

    def __init__(self, threshold: int = 32, patience: int = 3, hysteresis: int = 4) -> None:
        """
        Raises:
            ValueError: a threshold or a patience below 1, or a negative hysteresis.
        """
        for name, value, least in (
            ("threshold", threshold, 1),
            ("patience", patience, 1),
            ("hysteresis", hysteresis, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; allowed: {least} and more")
        self.threshold, self.patience, self.hysteresis = threshold, patience, hysteresis
        self._open = False
        self._calm = 0

    @property
    def max_batch(self) -> int:
        """The largest batch at which it can be open."""
        return self.threshold + self.hysteresis

    @property
    def is_open(self) -> bool:
        """The result of the last ``update``."""
        return self._open

    def update(self, batch: int) -> bool:
        """Update with the batch size of the next engine step; returns whether to speculate in it.

        Raises:
            ValueError: ``batch`` is negative.
        """
        if batch < 0:
            raise ValueError(f"batch is {batch}; allowed: 0 and more")
        self._calm = min(self._calm + 1, self.patience) if batch <= self.threshold else 0
        if self._open:
            self._open = batch <= self.max_batch
        else:
            self._open = self._calm >= self.patience
        return self._open

    def reset(self) -> None:
        """Close the gate, as at the start of a rollout."""
        self._open, self._calm = False, 0

    def state(self) -> dict[str, Any]:
        """The state as JSON."""
        return {"open": self._open, "calm": self._calm}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()``."""
        self._open, self._calm = bool(state["open"]), min(int(state["calm"]), self.patience)
