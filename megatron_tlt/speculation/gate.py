"""When to speculate at all: only where the running batch is small, and has been for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ElasticGate:
    """On after ``patience`` engine steps in a row with at most ``threshold`` requests (TLT, adaptive rollout engine).

    Off as soon as a batch is above ``threshold + hysteresis``; in between it stays as it is. So it never opens without
    ``patience`` small batches since it closed, and never closes without a batch above the upper bound.
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
        """The largest batch that it can be open for."""
        return self.threshold + self.hysteresis

    @property
    def is_open(self) -> bool:
        """As the last ``update`` said."""
        return self._open

    def update(self, batch: int) -> bool:
        """Take in the batch of the engine step to come; whether to speculate in it.

        Raises:
            ValueError: a negative batch.
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
        """Closed, as at the start of a rollout."""
        self._open, self._calm = False, 0

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"open": self._open, "calm": self._calm}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result."""
        self._open, self._calm = bool(state["open"]), min(int(state["calm"]), self.patience)
