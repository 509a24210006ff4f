"""The section ``schedule``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from megatron_tlt.config.section import Section
from megatron_tlt.config.tail import continue_violations, racing_violations

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig


class ScheduleConfig(Section):
    """Bounded asynchrony: a rollout ends before all that it began, and the next step continues the rest.

    ``partial`` decodes ``eta_prompts`` times the problems of a step (1.5 unless given) and trains on those that end
    first, by the tokens decoded in the step. ``one_step_off`` trains on the problems that the step before began, and
    fills its engines with as many of the next step. A response whose oldest token would be more than
    ``max_staleness`` steps old is generated anew; with ``one_step_off`` that is 1. Without the section, or with
    ``schedule: sync``, a step waits for all that it began.
    """

    kind: Literal["partial", "one_step_off"]
    eta_prompts: Annotated[float, Field(gt=1, le=4)] | None = None
    max_staleness: PositiveInt = 4

    @model_validator(mode="before")
    @classmethod
    def _one_step(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") == "one_step_off" and values.get("max_staleness") is None:
            return {**values, "max_staleness": 1}
        return values


def _without_sync(found: Any) -> Any:
    """None for what no section is, too."""
    if found == "sync":
        return None
    if not isinstance(found, dict) or found.get("kind") != "sync":
        return found
    if others := [key for key, value in found.items() if key != "kind" and value is not None]:
        raise ValueError(f"found kind: sync with {', '.join(others)}, which it does not read; allowed: kind alone")
    return None


OptionalSchedule = Annotated[ScheduleConfig | None, BeforeValidator(_without_sync)]
"""The section, or None: ``schedule: sync``, which is the default."""


def trains_on_other_policies(config: TltConfig) -> bool:
    """Whether responses have tokens that neither the actor nor an engine with its weights sampled, by the config."""
    continues = config.schedule is not None or (config.tail is not None and config.tail.deferred == "continue")
    return continues or config.reshard.method == "none"


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
    if schedule.kind == "one_step_off" and schedule.max_staleness != 1:
        found = f"found {schedule.max_staleness}; kind: one_step_off trains on tokens of one step before"
        yield f"schedule.max_staleness: {found}; allowed: 1, or absent"
    yield from continue_violations(config, f"schedule.kind: found {schedule.kind}")
    yield from racing_violations(config, "schedule")
