"""The times of all ranks for the straggler check."""

from __future__ import annotations

from megatron_tlt.actor.megatron_pass_clock import PassClock
from megatron_tlt.config.guard import GuardConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import warn
from megatron_tlt.platform.nodes import node_name
from megatron_tlt.trainer.straggler_check import StragglerCheck

_PHASES = ("rollout", "log-probs", "update")


class RankTimes:
    """Collects this rank's seconds per token in each phase, and compares those of all ranks once per step.

    Args:
        settings: with ``straggler_factor``.
        clock: of the policy's passes.
        counts_rollout: False where the tokens of a batch are not those that an engine decoded in the step.
        engine: relative speed of this rank's engine (the section ``speeds``), for which it is not called slow.
        replica: that of its data-parallel rank.
    """

    def __init__(
        self,
        settings: GuardConfig,
        clock: PassClock,
        *,
        counts_rollout: bool,
        engine: float = 1.0,
        replica: float = 1.0,
    ) -> None:
        assert settings.straggler_factor is not None
        self._clock, self._counts_rollout = clock, counts_rollout
        self._speeds = engine, replica, replica
        clock.enabled = True
        hosts = all_gather_data(node_name(), str)
        self._check = StragglerCheck(settings.straggler_factor, settings.straggler_steps, hosts)
        self._rollout: float | None = None

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks that are slow now, the same on all ranks."""
        return self._check.slow_ranks

    def end_rollout(self, seconds: float, batch: RolloutBatch) -> None:
        """After a rollout in which this rank's engine decoded for so long.

        ``batch`` holds the responses of the engine on its first rank, and none on the others.
        """
        tokens = sum(batch.response_length(i) for i in batch.held)
        self._rollout = seconds / tokens if tokens and self._counts_rollout else None

    def end_step(self) -> dict[str, float]:
        """Warns about slow ranks; a collective. Returns the metric."""
        seconds = (self._rollout, self._clock.take(training=False), self._clock.take(training=True))
        mine = tuple(None if s is None else s * speed for s, speed in zip(seconds, self._speeds, strict=True))
        Row = tuple[float | None, float | None, float | None]
        ranks = all_gather_data(mine, Row)
        for line in self._check.add_times({phase: [row[i] for row in ranks] for i, phase in enumerate(_PHASES)}):
            warn(line)
        return {"guard/slowest_rank_ratio": self._check.ratio}
