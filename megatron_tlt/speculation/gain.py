"""What speculation gained in a rollout: how long the same responses would have taken without it."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tlt.speculation.plain_times import OUTLIER, SETTLING, StepSeconds
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy

LEAST_COVERAGE = 0.9
"""Share of the time without speculation that has to be at batches near measured ones."""


def running_batches(lengths: Sequence[int], slots: int) -> list[tuple[int, int]]:
    """(batch, steps in a row) of a rollout of one token per request and step, in order.

    Requests, of these lengths in tokens, start in order, at most ``slots`` at once; a free slot is taken by the next.
    The batches times their steps add up to all tokens.
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
    """A rollout of one engine, or the slowest of several, with and without speculation.

    Attributes:
        seconds: from the start of its first step to the end of its last one, as measured.
        plain_seconds: the same without speculation, estimated; 0 where nothing is known.
        coverage: share of ``plain_seconds`` at batches near which a step without drafts was measured.
    """

    seconds: float
    plain_seconds: float
    coverage: float

    @property
    def gain(self) -> float | None:
        """How many times as long the rollout takes without speculation; None where too little was measured."""
        known = self.coverage >= LEAST_COVERAGE and self.seconds > 0
        return self.plain_seconds / self.seconds if known else None


def slowest(rollouts: Sequence[RolloutGain]) -> RolloutGain | None:
    """Of all engines: the rollout ends with the last one, with speculation and without."""
    if not rollouts:
        return None
    return RolloutGain(
        max(one.seconds for one in rollouts),
        max(one.plain_seconds for one in rollouts),
        min(one.coverage for one in rollouts),
    )


class GainMeter:
    """Follows the steps of an engine over its rollouts and estimates what each rollout would take without speculation.

    Without it a request of n tokens is in n steps, so lengths, and how many requests the engine held at once, give the
    batch of every step (``running_batches``). Each takes what steps without drafts took at that batch, and the time
    between two steps, less what the chooser of strategies took. Of steps without drafts in a row the first ``SETTLING``
    do not count. What is the same either way is added as measured: what a prompt added to its step over steps of the
    same batch without one (less its first drafts), and what responses that ended added between two. Steps that took
    far longer than others of their kind (other processes on the machine) lengthen both alike, by their share of the
    rollout.

    What this leaves out: a step's time depends on the batch alone, not on the contexts' lengths or on which of a
    mixture's experts are used. Requests that were preempted for want of KV cache are taken to fit at once. The engine
    is one that could speculate: it keeps hidden states for its drafter also in steps without drafts.
    """

    def __init__(self) -> None:
        self.plain = StepSeconds()
        """Of steps without drafts."""
        self._drafted: dict[Strategy, StepSeconds] = {}
        self.begin_rollout()

    def begin_rollout(self) -> None:
        """A rollout begins."""
        self._first: float | None = None
        self._end = self._chooser_s = 0.0
        self._plain_in_a_row = SETTLING  # nothing was drafted before
        self._between: list[float] = []
        self._slots = 0
        self._speculated = False
        self._steps: list[StepRecord] = []

    def used(self, seconds: float) -> None:
        """So long the chooser of strategies took between two steps: to learn from the last one, to choose the next."""
        self._chooser_s += seconds

    def observe(self, step: StepRecord) -> bool:
        """Take in a step; whether it shows what one without drafts takes."""
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
        """The rollout is over; ``lengths`` are its responses' in tokens, in the order of their requests."""
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
                # a step that verifies drafts is compared with steps that made drafts too
                drafting = step.drafting_s if step.strategy == OFF else 0.0
                prompts += max(0.0, beyond - drafting)
            elif step.duration > OUTLIER * self._usual(step):
                disturbed += beyond
                undisturbed += self._usual(step)
            else:
                undisturbed += step.duration
        # in few of them a response ends
        between = statistics.median(self._between) if self._between else 0.0
        others = prompts + between * num_steps + sum(self._between) - between * len(self._between)
        slowdown = 1.0 + disturbed / undisturbed if undisturbed else 1.0
        return RolloutGain(seconds, total * slowdown + others, near / total if total else 0.0)

    def _usual(self, step: StepRecord) -> float:
        """Seconds of a step without prompts that verifies drafts of the same strategy at this batch."""
        alike = self._drafted.get(step.strategy)
        known = alike if alike is not None and alike.covers(step.batch) else self.plain
        return known.seconds(step.batch)
