"""When a drafter in training is as good as it was: asked by the trainer and by the simulation of steps."""

from __future__ import annotations

SATURATED = 0.97
"""A drafter whose acceptance length is this share of its best gains little from further training."""
MOST_ACCEPTANCES = 8
"""Steps of which the best acceptance counts: one lucky step does not count for ever."""


def is_saturated(acceptance: float, best: float) -> bool:
    """Whether the newest acceptance length is near the ``best`` of the newest ``MOST_ACCEPTANCES`` steps, in tokens."""
    return acceptance >= SATURATED * best
