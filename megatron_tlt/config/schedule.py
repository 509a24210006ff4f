"""The section ``schedule``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from megatron_tlt.config.section import Section
from megatron_tlt.config.tail import continue_violations, racing_violations

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig


class ScheduleConfig(Section):
    """Bounded asynchrony: a rollout ends before all that it began, and the next step continues the rest.

    ``partial`` decodes ``eta_prompts`` times the problems of a step (1.5 unless given) and trains on those that end
    first, by the tokens decoded in the step. ``one_step_off`` trains on the problems that the step before began, and
    fills its engines with as many of the next step. A response whose oldest token would be more than
    ``max_staleness`` steps old is generated anew. Without the section a step waits for all that it began.
    """

    kind: Literal["partial", "one_step_off"]
    eta_prompts: Annotated[float, Field(gt=1, le=4)] | None = None
    max_staleness: PositiveInt = 4


def schedule_violations(config: TltConfig) -> Iterator[str]:
    """One line for each key that bounded asynchrony contradicts."""
    schedule = config.schedule
    if schedule is None:
        return
    if config.tail is not None:
        yield "schedule: found a section beside tail; both choose the problems of a step; allowed: one of them"
    if schedule.kind == "one_step_off" and schedule.eta_prompts is not None:
        found = f"found {schedule.eta_prompts:g}; kind: one_step_off always begins one step"
        yield f"schedule.eta_prompts: {found}; allowed: null"
    yield from continue_violations(config, f"schedule.kind: found {schedule.kind}")
    yield from racing_violations(config, "schedule")
