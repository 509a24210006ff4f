"""What speculation gained over a run, from the metrics of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunGain:
    """The time of a run's rollouts without speculation over that with it.

    Attributes:
        gain: over the steps in which it is known; None where there are none.
        known_steps: how many these are.
        steps: of the run.
        coverage: median over the steps of the share of the time without speculation at batches near measured ones.
    """

    gain: float | None
    known_steps: int
    steps: int
    coverage: float

    @staticmethod
    def of(rows: Sequence[Mapping[str, float | None]]) -> RunGain | None:
        """From the metrics rows of a run's steps; None where it did not speculate."""
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
        """Why there is no gain; None where there is one."""
        if self.gain is not None:
            return None
        return (
            f"engine steps without drafts were measured near {self.coverage:.0%} of the batches, by time, that "
            "rollouts would have without speculation; 90% are needed. At most 1% of the steps are spent on that, so a "
            "longer run measures more"
        )

    @staticmethod
    def line(summary: Mapping[str, Any]) -> str | None:
        """What the terminal says of a run with this summary; None where it did not speculate."""
        found = summary.get("speculation", {})
        gain, unknown = found.get("gain"), found.get("gain_unknown")
        if gain is None:
            return None if unknown is None else f"speculation: gain unknown: {unknown}"
        known, steps = found["gain_steps"], summary["steps"]
        part = "" if known == steps else f" (in {known} of {steps} steps)"
        return f"speculation: {gain:.2f} x the rollout without{part}"
