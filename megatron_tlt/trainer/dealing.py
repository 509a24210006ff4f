"""Assignment of a step's problems to engines."""

from __future__ import annotations


def engine_of(position: int, engines: int) -> int:
    """The engine that decodes all samples of the problem at this position of the step.

    Positions are assigned round-robin, so all engines get about the same number of problems. A problem that recurs has
    another position then, and in general another engine.
    """
    return position % engines


def num_dealt(problems: int, engines: int, engine: int) -> int:
    """How many of a step's ``problems`` this engine decodes; see :func:`engine_of`."""
    return len(range(engine, problems, engines))
