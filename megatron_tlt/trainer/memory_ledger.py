"""Memory of each phase of a step on a device: as planned, and as measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.memory import MemoryPlan, plan_memory
from megatron_tlt.rollout.adaptive import engine_graphs

logger = logging.getLogger(__name__)

START = "start"
_PLANNED_AS = {
    START: ("start, policy", "start, engine"),
    "rollout": ("rollout", "drafter, in the bubble"),
    "log_probs": ("log-probs",),
    "update": ("update",),
    "drafter": ("drafter",),
    "reshard": ("reshard",),
}
"""A run's phases, and the plan's phases that each contains."""


class MemoryLedger:
    """The plan's bytes of each phase on the fullest device, for comparison with a run's peaks."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._capacity = plan.capacity
        totals: dict[str, float] = {}
        for phase in plan.phases:
            totals[phase.phase] = max(phase.total, totals.get(phase.phase, 0.0))
        self._planned = {
            name: max(totals[part] for part in parts if part in totals)
            for name, parts in _PLANNED_AS.items()
            if any(part in totals for part in parts)
        }

    @classmethod
    def of_run(cls, config: TltConfig, capacity: int) -> MemoryLedger | None:
        """The ledger for GPUs of ``capacity`` bytes; None, with a warning, if the model cannot be planned."""
        try:
            job = job_of(config, on_gpu=True)
            if job.actor.optimizer.unknown:
                logger.warning("the plan takes the optimizer to keep two moments: %s", job.actor.optimizer.unknown)
            limits = job.engine.max_sequences, job.engine.batched_tokens
            return cls(plan_memory(job, capacity, engine_graphs(config.rollout, config.speculation, *limits)))
        except ConfigError as error:
            logger.warning("the memory of phases is not compared with a plan: %s", error)
            return None

    @property
    def at_start(self) -> str:
        """The planned phases in one line."""
        phases = ", ".join(f"{name} {_gib(size)}" for name, size in self._planned.items())
        return f"memory of a device as planned (GiB of {_gib(self._capacity)}): {phases}"

    def after_step(self, peaks: Mapping[str, float]) -> str:
        """The measured phases beside the planned ones; ``peaks``: bytes on the fullest device by phase."""
        phases = ", ".join(
            f"{name} {_gib(size)}" + (f" ({_gib(self._planned[name])})" if name in self._planned else "")
            for name, size in peaks.items()
        )
        return f"memory of the fullest device at most, and as planned (GiB of {_gib(self._capacity)}): {phases}"

    def ratios(self, peaks: Mapping[str, float]) -> dict[str, float]:
        """Measured over planned bytes of each phase that is in both."""
        return {name: size / self._planned[name] for name, size in peaks.items() if self._planned.get(name)}


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
