"""The section ``integrity``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.section import NonNegativeInt, Section

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig


class IntegrityConfig(Section):
    """Checks that find silent corruption while a run trains.

    Every ``replicas_every`` steps (0: never), and before each save, data-parallel replicas compare checksums of the
    actor's weights. ``on_difference: stop`` ends the run with the ranks that differ; ``warn`` goes on.

    ``checkpoints`` reads each published checkpoint again in the background and compares it with its manifest. It is off
    unless you ask for it: it reads as many bytes as the run writes.
    """

    replicas_every: NonNegativeInt = 0
    on_difference: Literal["stop", "warn"] = "stop"
    checkpoints: bool = False


def integrity_violations(config: TltConfig) -> Iterator[str]:
    """One line for each check that has nothing to compare."""
    every = config.integrity.replicas_every
    layout = Layout.read(config.actor.megatron, config.launcher.world_size)
    if every and layout.dp * layout.cp < 2:
        yield (
            f"integrity.replicas_every: found {every}; the layout {layout} has one replica of the weights, with none "
            "to compare it with; allowed: 0, or a layout with at least two data-parallel or context-parallel ranks"
        )
