"""Who gets the bubble: what a rank does between the end of its engine and the end of the last one; pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from megatron_tlt.planning.saturation import is_saturated

BubbleUse = Literal["drafter", "stream", "nothing"]
_MOST_ROLLOUTS = 8


class RolloutHistory:
    """What the seconds of earlier rollouts, of the newest eight, say about one that goes on."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_MOST_ROLLOUTS)

    def add(self, seconds: float) -> None:
        """Adds a rollout, from its begin until its last engine was done."""
        self._seconds.append(seconds)

    def remaining(self, elapsed: float) -> float | None:
        """Expected seconds until the last engine is done, after ``elapsed``: the mean over rollouts that took longer.

        None if none did, so that nothing is known.
        """
        longer = [seconds - elapsed for seconds in self._seconds if seconds > elapsed]
        return sum(longer) / len(longer) if longer else None


@dataclass(frozen=True)
class Bubble:
    """A rank's bubble, some time after its begin.

    Attributes:
        remaining_s: expected seconds until it ends; None if nothing is known.
        first_part_s: seconds until the first part of a streamed gradient is done: loading the policy, and its passes.
        has_drafter: the drafter is trained here, or may still be.
        drafter_steps: steps of it in this rollout.
        least_drafter_steps: that every RL step owes it (``spot.min_steps``).
        acceptance: of its drafts in the newest step, in tokens per verification; None if none were made.
        best_acceptance: the highest of the newest eight steps.
    """

    remaining_s: float | None
    first_part_s: float
    has_drafter: bool = False
    drafter_steps: int = 0
    least_drafter_steps: int = 0
    acceptance: float | None = None
    best_acceptance: float | None = None

    @property
    def use(self) -> BubbleUse:
        """A drafter in training, until it has its steps and is as good as it was; else the gradient, if a part fits.

        A part is never cut short, so the gradient comes last. It is tried where nothing is known of the bubble's end.
        """
        fits = self.remaining_s is None or self.remaining_s > self.first_part_s
        if self.has_drafter and not (self._is_drafter_done and fits):
            return "drafter"
        return "stream" if fits else "nothing"

    @property
    def _is_drafter_done(self) -> bool:
        if self.drafter_steps < self.least_drafter_steps or self.acceptance is None or self.best_acceptance is None:
            return False
        return is_saturated(self.acceptance, self.best_acceptance)
