"""Assignment of a step's problems to engines."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.config.speeds import turns


class Dealing:
    """Which engine decodes all samples of the problem at a position of the step.

    Positions are assigned round-robin, or by speed (``config.speeds.turns``), so that all engines end at about the same
    time. A problem that recurs has another position then, and in general another engine.

    Args:
        engines: number of engines.
        speeds: of each engine; None: equal.
    """

    def __init__(self, engines: int, speeds: Sequence[float] | None = None) -> None:
        self._turns = turns([1.0] * engines if speeds is None else speeds)
        self._engines: list[int] = []

    def engine_of(self, position: int) -> int:
        """The engine of the problem at this position; does not depend on how many there are."""
        while len(self._engines) <= position:
            self._engines.append(next(self._turns))
        return self._engines[position]

    def num_dealt(self, problems: int, engine: int) -> int:
        """How many of a step's ``problems`` this engine decodes."""
        return sum(self.engine_of(position) == engine for position in range(problems))
