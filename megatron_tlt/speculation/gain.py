"""The gain of speculation in a rollout: an estimate of the time that the same responses take without it."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tlt.speculation.plain_times import OUTLIER, SETTLING, StepSeconds
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy

LEAST_COVERAGE = 0.9
"""Minimum share of the time without speculation at batch sizes near measured ones."""


def running_batches(lengths: Sequence[int], slots: int) -> list[tuple[int, int]]:
    """Running batches of a rollout that decodes one token per request and step, as (batch, consecutive steps).

    Requests of these lengths (in tokens) start in order, at most ``slots`` at once; the next request takes a free slot.
    The sum of batch times steps is the total number of tokens.
    """
    waiting = iter([length for length in lengths if length > 0])
    ends: list[int] = []
    now, found = 0, list[tuple[int, int]]()
    while True:
        while len(ends) < slots and (length := next(waiting, None)) is not None:
            heapq.heappush(ends, now + length)
        if not ends:
            return found
        batch, until = len(ends), ends[0]
        found.append((batch, until - now))
        now = until
        while ends and ends[0] == now:
            heapq.heappop(ends)


@dataclass(frozen=True)
class RolloutGain:
    """Time of a rollout with and without speculation, of one engine or of the slowest of several.

    Attributes:
        seconds: measured, from the start of the first step to the end of the last.
        plain_seconds: estimated time without speculation; 0 if unknown.
        coverage: share of ``plain_seconds`` at batch sizes near which a step without drafts was measured.
    """

    seconds: float
    plain_seconds: float
    coverage: float

    @property
    def gain(self) -> float | None:
        """Time without speculation divided by the time with it; None if too little was measured."""
        known = self.coverage >= LEAST_COVERAGE and self.seconds > 0
        return self.plain_seconds / self.seconds if known else None


def slowest(rollouts: Sequence[RolloutGain]) -> RolloutGain | None:
    """The rollout of all engines: it ends with the slowest engine, with and without speculation."""
    if not rollouts:
        return None
    return RolloutGain(
        max(one.seconds for one in rollouts),
        max(one.plain_seconds for one in rollouts),
        min(one.coverage for one in rollouts),
    )


class GainMeter:
    """Observes an engine's steps and estimates how long each rollout would take without speculation.

    Without speculation a request of n tokens takes n steps. The response lengths and the number of concurrent requests
    therefore give the batch of every step (``running_batches``). The estimate of a step is the measured time of steps
    without drafts at that batch, plus the time between steps without the chooser's share. Of consecutive steps without
    drafts the first ``SETTLING`` do not count.

    Costs that speculation does not change are added as measured: the extra time of a step with a prompt over steps of
    the same batch without one (minus its first drafts), and the extra time between steps when responses end. Outliers
    (other processes on the machine) lengthen the estimate by their share of the rollout.

    Limits: a step's time depends only on the batch, not on context lengths or on the experts used. Requests preempted
    for lack of KV cache are assumed to fit. Steps without drafts still include keeping hidden states for the drafter.
    """

    def __init__(self) -> None:
        self.plain = StepSeconds()
        """Step times without drafts."""
        self._drafted: dict[Strategy, StepSeconds] = {}
        self.begin_rollout()

    def begin_rollout(self) -> None:
        """Start a rollout."""
        self._first: float | None = None
        self._end = self._chooser_s = 0.0
        self._plain_in_a_row = SETTLING  # nothing was drafted before
        self._between: list[float] = []
        self._slots = 0
        self._speculated = False
        self._steps: list[StepRecord] = []

    def used(self, seconds: float) -> None:
        """Add time that the chooser took between two steps, for observing the last and choosing the next strategy."""
        self._chooser_s += seconds

    def observe(self, step: StepRecord) -> bool:
        """Record a step; returns whether it measures the time of a step without drafts."""
        if self._first is None:
            self._first = step.start
        else:
            self._between.append(step.start - self._end - self._chooser_s)
        self._end, self._chooser_s = step.start + step.duration, 0.0
        self._slots = max(self._slots, step.batch)
        self._speculated |= step.strategy != OFF or step.next_strategy not in (None, OFF)
        self._steps.append(step)
        plain = step.strategy == OFF
        self._plain_in_a_row = self._plain_in_a_row + 1 if plain else 0
        counts = step.is_steady and (not plain or self._plain_in_a_row > SETTLING)
        if counts:
            seconds = self.plain if plain else self._drafted.setdefault(step.strategy, StepSeconds())
            seconds.observe(step.batch, step.duration)
        return plain and counts

    def end_rollout(self, lengths: Sequence[int]) -> RolloutGain:
        """End the rollout; ``lengths`` are its responses' token counts, in the order of the requests."""
        if self._first is None:
            return RolloutGain(0.0, 0.0, 0.0)
        seconds = self._end - self._first
        if not self._speculated:
            return RolloutGain(seconds, seconds, 1.0)
        if not len(self.plain):
            return RolloutGain(seconds, 0.0, 0.0)
        total = near = 0.0
        num_steps = 0
        for batch, steps in running_batches(lengths, self._slots):
            time = steps * self.plain.seconds(batch)
            num_steps += steps
            total += time
            near += time * self.plain.covers(batch)
        prompts = disturbed = undisturbed = 0.0
        for step in self._steps:
            beyond = step.duration - self._usual(step)
            if step.had_prefill:
                # a verification step is compared with steps that also drafted
                drafting = step.drafting_s if step.strategy == OFF else 0.0
                prompts += max(0.0, beyond - drafting)
            elif step.duration > OUTLIER * self._usual(step):
                disturbed += beyond
                undisturbed += self._usual(step)
            else:
                undisturbed += step.duration
        # a response ends between few of the steps, so the median is the time without that
        between = statistics.median(self._between) if self._between else 0.0
        others = prompts + between * num_steps + sum(self._between) - between * len(self._between)
        slowdown = 1.0 + disturbed / undisturbed if undisturbed else 1.0
        return RolloutGain(seconds, total * slowdown + others, near / total if total else 0.0)

    def _usual(self, step: StepRecord) -> float:
        """Usual seconds of a step without prompts that verifies drafts of the same strategy at this batch."""
        alike = self._drafted.get(step.strategy)
        known = alike if alike is not None and alike.covers(step.batch) else self.plain
        return known.seconds(step.batch)
