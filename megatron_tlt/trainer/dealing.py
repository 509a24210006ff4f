"""Which engine decodes which problem of a step."""

from __future__ import annotations


def engine_of(position: int, engines: int) -> int:
    """The engine that decodes all samples of the problem at this position of the step.

    Positions are dealt in turn, so engines have equally many problems. A problem that comes again has another position,
    and in general another engine.
    """
    return position % engines
