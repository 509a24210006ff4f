"""Speed-up by speculation over a run, from its steps' metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunGain:
    """Rollout time without speculation divided by that with it.

    Attributes:
        gain: over the steps in which it is known; None if there are none.
        known_steps: number of these steps.
        steps: number of steps of the run.
        coverage: share of the time without speculation at batches near measured ones; median over the steps.
    """

    gain: float | None
    known_steps: int
    steps: int
    coverage: float

    @staticmethod
    def of(rows: Sequence[Mapping[str, float | None]]) -> RunGain | None:
        """Computes the gain from a run's metrics rows; None if it did not speculate."""
        measured = [row for row in rows if row.get("speculation/rollout_s")]
        if not measured:
            return None
        known = [row for row in measured if row.get("speculation/plain_rollout_s") is not None]
        plain, seconds = (
            sum(row.get(f"speculation/{name}") or 0.0 for row in known) for name in ("plain_rollout_s", "rollout_s")
        )
        coverage = statistics.median(row.get("speculation/gain_coverage") or 0.0 for row in measured)
        return RunGain(plain / seconds if known else None, len(known), len(rows), coverage)

    @property
    def unknown(self) -> str | None:
        """Why the gain is unknown; None if it is known."""
        if self.gain is not None:
            return None
        return (
            f"engine steps without drafts were measured near {self.coverage:.0%} of the batches, by time, that "
            "rollouts have without speculation; 90% are needed. At most 1% of the steps are spent on that, so a longer "
            "run measures more"
        )

    @staticmethod
    def line(summary: Mapping[str, Any]) -> str | None:
        """The terminal's line for a run with this summary; None if it did not speculate."""
        found = summary.get("speculation", {})
        gain, unknown = found.get("gain"), found.get("gain_unknown")
        if gain is None:
            return None if unknown is None else f"speculation: gain unknown: {unknown}"
        known, steps = found["gain_steps"], summary["steps"]
        part = "" if known == steps else f" (in {known} of {steps} steps)"
        return f"speculation: {gain:.2f} x the rollout without{part}"
