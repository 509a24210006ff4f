"""The section of the spot trainer, which trains the drafter on ranks that wait for the rollout to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.section import NonNegativeInt, PositiveInt, Section

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SpotConfig(Section):
    """Engines that have finished their share of a rollout train the drafter until the last one has finished.

    The global batch of a drafter step is ``drafter.entries_per_step`` times the number of all ranks, whichever ranks
    train. A session starts when ``min_replicas`` engines are idle and together hold ``min_entries`` responses; further
    engines join it. The default of ``min_replicas`` is 2 (1 with two engines); that of ``min_entries`` is half of an RL
    step's responses for that many engines, at most a global batch. The leader writes a checkpoint every
    ``checkpoint_every`` steps. If sessions gave fewer than ``min_steps`` steps in an RL step, all ranks train the rest
    after the update. ``memory_gib`` bounds the device memory of training on a rank. Engines keep the hidden states of a
    rollout in up to ``states_bytes`` of host memory per rank, so that sessions can also train on responses that have
    just finished (0: only on those of earlier steps).

    ``host`` is the address of rank 0's coordinator; the default is 127.0.0.1 on one node, else the launch's master
    address. All times are in seconds. Ranks report every ``heartbeat_s``. A rank without a report for ``lost_after_s``
    is lost. If the coordinator does not answer for ``silent_after_s``, ranks stop training, so a rollout never waits
    longer than that. A session without a step for ``session_timeout_s``, which must exceed the time of a step, is
    ended. After ``grace_s`` the other members stop waiting for a member that does not stop; after
    ``preempt_timeout_s`` it is excluded for the rest of that RL step.
    """

    min_replicas: PositiveInt | None = None
    min_entries: PositiveInt | None = None
    checkpoint_every: PositiveInt = 50
    min_steps: NonNegativeInt = 0
    states_bytes: NonNegativeInt = 1 << 30
    memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    host: Annotated[str, Field(min_length=1)] | None = None
    heartbeat_s: Seconds = 0.5
    lost_after_s: Seconds = 10.0
    silent_after_s: Seconds = 3.0
    session_timeout_s: Seconds = 120.0
    grace_s: Seconds = 2.0
    preempt_timeout_s: Seconds = 5.0

    @model_validator(mode="after")
    def _times_in_order(self) -> SpotConfig:
        for name in ("lost_after_s", "silent_after_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                least = f"twice heartbeat_s, {2 * self.heartbeat_s}"
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")
        if self.grace_s >= self.preempt_timeout_s:
            raise ValueError(f"grace_s is {self.grace_s}; allowed: below preempt_timeout_s, {self.preempt_timeout_s}")
        return self


def session_start(config: TltConfig) -> tuple[int, int]:
    """The numbers of idle engines and of their responses that start a session, as configured or by default."""
    spot, drafter = config.spot or SpotConfig(), config.drafter or DrafterConfig()
    world = config.launcher.world_size
    engines = max(1, world // config.rollout.tensor_parallel_size)
    replicas = spot.min_replicas or max(1, min(2, engines - 1))
    share = config.trainer.prompts_per_step * config.algorithm.group_size * replicas // (2 * engines)
    return replicas, spot.min_entries or max(1, min(drafter.entries_per_step * world, share))
