"""The section of the spot trainer, which trains the drafter on ranks that wait for the rollout's end."""

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

    ``drafter.entries_per_step`` times all ranks is a step's global batch, whoever trains it. A session starts once
    ``min_replicas`` engines are idle and hold ``min_entries`` responses among them; further ones join. By default
    ``min_replicas`` is 2 (1 of two engines), and ``min_entries`` is half of an RL step's responses for so many engines,
    at most a global batch. Its leader writes a checkpoint every ``checkpoint_every`` steps. Where the bubble gave fewer
    than ``min_steps`` in an RL step, all ranks train the rest after the update. ``memory_gib`` bounds what training
    takes of a rank's device. Hidden states that an engine computes in a rollout are kept, in up to ``states_bytes`` of
    host memory a rank, so that sessions learn from the responses that have just ended too (0: from earlier steps').

    ``host`` is where rank 0's coordinator listens; by default 127.0.0.1 on one node, else the launch's master address.
    Times are seconds. Ranks report every ``heartbeat_s``; one that is not heard for ``lost_after_s`` is lost, and a
    coordinator for ``silent_after_s`` silent: who trains stops then, so no rollout waits for it longer than that. A
    session without a step for ``session_timeout_s``, which has to be more than a step takes, is ended. A member that
    does not stop within ``grace_s`` is no longer waited for by the others, and one that has not within
    ``preempt_timeout_s`` takes no further part in that RL step.
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
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least}, and more")
        if self.grace_s >= self.preempt_timeout_s:
            raise ValueError(f"grace_s is {self.grace_s}; allowed: below preempt_timeout_s, {self.preempt_timeout_s}")
        return self


def session_start(config: TltConfig) -> tuple[int, int]:
    """How many idle engines start a session, and how many responses these have to hold, as given or by default."""
    spot, drafter = config.spot or SpotConfig(), config.drafter or DrafterConfig()
    world = config.launcher.world_size
    engines = max(1, world // config.rollout.tensor_parallel_size)
    replicas = spot.min_replicas or max(1, min(2, engines - 1))
    share = config.trainer.prompts_per_step * config.algorithm.group_size * replicas // (2 * engines)
    return replicas, spot.min_entries or max(1, min(drafter.entries_per_step * world, share))
