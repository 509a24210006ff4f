"""Diagnoses why the spot trainer did not train the drafter in an RL step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_tlt.platform.device import warn
from megatron_tlt.trainer.spot_trainer import SpotReport

# upper bound of the time that a reachable coordinator needs to start a session
_START_S = 5.0


@dataclass(frozen=True)
class SessionDiagnosis:
    """Whether a session could start in an RL step, and why none trained the drafter.

    Attributes:
        entries: responses in the buffers of the engines that waited for the last one.
        ready_s: seconds between enough engines waiting with enough responses and the end of the last engine's rollout;
            0 if this condition was never met.
        reason: a key of ``REASONS``; None if the drafter was trained.
    """

    entries: int
    ready_s: float
    reason: str | None

    @classmethod
    def of(
        cls, reports: Sequence[SpotReport], ranks_per_engine: int, min_replicas: int, min_entries: int, version: int
    ) -> SessionDiagnosis:
        """From the reports of all ranks in rank order; ``version`` is the drafter's before the step."""
        starts = range(0, len(reports), ranks_per_engine)
        engines = sorted(
            (max(report.released_at for report in ranks), sum(report.entries for report in ranks))
            for ranks in (reports[start : start + ranks_per_engine] for start in starts)
        )
        waited, over = engines[:-1], engines[-1][0]
        held = list(accumulate(entries for _, entries in waited))
        ready = [
            at
            for number, ((at, _), entries) in enumerate(zip(waited, held, strict=True), 1)
            if number >= min_replicas and entries >= min_entries
        ]
        entries, ready_s = held[-1] if held else 0, over - ready[0] if ready else 0.0
        reason = None
        if max(report.version for report in reports) <= version:
            if not any(report.entries for report in reports):
                reason = "no_data"
            elif not ready:
                reason = "few_entries"
            elif any(report.sessions for report in reports):
                reason = "no_step"
            else:
                reason = "short_wait" if ready_s < _START_S else "no_order"
        return cls(entries, ready_s, reason)

    @property
    def metrics(self) -> dict[str, float]:
        """The step's metrics; ``spot/untrained`` and the metric of the reason are 1 if the drafter was not trained."""
        untrained = float(self.reason is not None)
        reason = {} if self.reason is None else {f"spot/untrained_{self.reason}": 1.0}
        metrics = {"spot/entries": float(self.entries), "spot/ready_s": self.ready_s, "spot/untrained": untrained}
        return metrics | reason


REASONS = {
    "no_data": "no rank's buffer holds a response",
    "few_entries": "the engines that waited hold {entries} responses; a session needs {min_entries} (spot.min_entries)",
    "short_wait": (
        "the last engine finished {ready_s:.2f} s after {min_replicas} others (spot.min_replicas) waited with enough "
        "responses"
    ),
    "no_step": "a session started, but no step of it was finished",
    "no_order": (
        "enough engines waited {ready_s:.1f} s with enough responses, but no rank entered a session; the log says "
        "whether ranks withdrew or lost the coordinator"
    ),
}


class SessionWarnings:
    """Warns on the terminal if no session trained the drafter, once per reason."""

    def __init__(self, min_replicas: int, min_entries: int) -> None:
        self._bounds = {"min_replicas": min_replicas, "min_entries": min_entries}
        self._given: set[str] = set()

    def check(self, step: int, diagnosis: SessionDiagnosis) -> None:
        """Warns about RL step ``step`` (counted from 0); missing data is no reason to warn in step 0."""
        reason = diagnosis.reason
        if reason is None or reason in self._given or (step == 0 and reason == "no_data"):
            return
        self._given.add(reason)
        why = REASONS[reason].format(entries=diagnosis.entries, ready_s=diagnosis.ready_s, **self._bounds)
        warn(f"spot did not train the drafter in step {step + 1}: {why}")
