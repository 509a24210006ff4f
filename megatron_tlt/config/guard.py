"""The section ``guard``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_tlt.config.section import PositiveInt, Section

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig

Factor = Annotated[float, Field(gt=1, allow_inf_nan=False)]


class GuardConfig(Section):
    """What follows a bad update or a slow rank. Without the section, a gradient that is not finite stops the run.

    An update is not finite if the norm of its gradient or its loss is NaN or infinite. It is a spike if that norm
    exceeds ``spike_factor`` times the median of the last ``spike_window`` applied updates; half of them must be known.

    ``skip`` leaves weights, optimizer and learning rate as they are. ``go_back`` loads the newest checkpoint and goes
    on with problems that were not drawn yet. After ``most_in_a_row`` of these without progress the run stops.
    ``keep_batches`` responses of bad steps are kept in the run's folder ``guard``, for ``tlt replay``.

    A rank that takes ``straggler_factor`` times the median time per token, for ``straggler_steps`` steps in a row, is
    reported. With ``on_straggler: leave_out`` the launch then goes on without its node until it ends, if
    ``elastic.min_devices`` are left.
    """

    on_nonfinite: Literal["stop", "skip", "go_back"] = "stop"
    spike_factor: Factor | None = None
    spike_window: Annotated[int, Field(ge=2)] = 20
    on_spike: Literal["warn", "skip", "go_back"] = "warn"
    most_in_a_row: PositiveInt = 3
    keep_batches: PositiveInt = 5
    straggler_factor: Factor | None = None
    straggler_steps: PositiveInt = 5
    on_straggler: Literal["warn", "leave_out"] = "warn"

    @property
    def going_back(self) -> list[str]:
        """The keys that may send the run back to a checkpoint."""
        return [key for key in ("on_nonfinite", "on_spike") if getattr(self, key) == "go_back"]


def guard_violations(config: TltConfig) -> Iterator[str]:
    """One line for each key that going back contradicts."""
    guard, elastic = config.guard, config.elastic
    if guard is None:
        return
    if guard.on_straggler == "leave_out":
        if guard.straggler_factor is None:
            yield "guard.on_straggler: found leave_out without guard.straggler_factor; allowed: warn, or a factor"
        if elastic is None or elastic.min_devices is None:
            yield (
                "guard.on_straggler: found leave_out without elastic.min_devices, so the launch cannot go on without "
                "a node; allowed: warn, or a number of devices"
            )
    for key in guard.going_back:
        where = f"guard.{key}: found go_back"
        if not config.trainer.save_every:
            yield f"{where} with trainer.save_every = 0, so there is no checkpoint; allowed: another value of either"
        for section in ("tail", "schedule"):
            if getattr(config, section) is not None:
                yield (
                    f"{where} with a section {section}, whose responses belong to steps that would be undone; allowed: "
                    "skip"
                )
        if config.algorithm.kl.update_every:
            yield f"{where} with algorithm.kl.update_every, whose reference would be of a later step; allowed: skip"
    if guard.on_spike != "warn" and guard.spike_factor is None:
        yield f"guard.on_spike: found {guard.on_spike} without guard.spike_factor; allowed: warn, or a factor above 1"
