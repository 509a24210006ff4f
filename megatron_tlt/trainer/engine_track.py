"""Engine steps in the timeline: strategy, batch size, accepted drafts and duration."""

from __future__ import annotations

from megatron_tlt.observe.timeline import ENGINE_TRACK, Timeline
from megatron_tlt.speculation.strategy import StepRecord

# maximum number of engine steps in one span, so that changes of acceptance stay visible
_MAX_STEPS = 64


class EngineTrack:
    """Writes one span per run of consecutive steps with equal strategy and batch size, in a separate track."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._origin = timeline.now()
        self._rollout = 0
        self._steps: list[StepRecord] = []

    def begin_rollout(self) -> None:
        """Starts a rollout; start times of steps count from this moment."""
        self._origin = self._timeline.now()
        self._rollout += 1
        self._steps = []

    def add(self, step: StepRecord) -> None:
        """Adds a finished step."""
        last = self._steps[-1] if self._steps else None
        if last is not None and (
            (last.strategy, last.batch, last.had_prefill) != (step.strategy, step.batch, step.had_prefill)
            or len(self._steps) >= _MAX_STEPS
        ):
            self.flush()
        if last is None or last.batch != step.batch:
            self._timeline.counter("running requests", step.batch, self._origin + step.start)
        self._steps.append(step)

    def flush(self) -> None:
        """Writes the span of the steps collected so far."""
        if not self._steps:
            return
        first, last = self._steps[0], self._steps[-1]
        seconds = sum(step.duration for step in self._steps)
        tokens = sum(step.num_tokens for step in self._steps)
        self._timeline.add(
            first.strategy.name,
            self._origin + first.start,
            last.start + last.duration - first.start,
            ENGINE_TRACK,
            track=ENGINE_TRACK,
            rollout=self._rollout,
            batch=first.batch,
            steps=len(self._steps),
            ms_per_step=round(1e3 * seconds / len(self._steps), 3),
            tokens_per_request=round(tokens / (len(self._steps) * max(1, first.batch)), 3),
            drafted=sum(step.num_draft_tokens for step in self._steps),
            accepted=sum(step.num_accepted_tokens for step in self._steps),
            prefill=first.had_prefill,
        )
        self._steps = []
