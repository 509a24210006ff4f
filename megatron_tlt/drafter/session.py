"""A session: steps of drafter training in a row, on data of a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_tlt.drafter.buffer import DataBuffer
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.training import DrafterTrainer, Failure
from megatron_tlt.platform.rank_group import RankGroup

SessionOutcome = Literal["completed", "stopped", "no_tokens", Failure]


@dataclass(frozen=True)
class SessionResult:
    """How a session ended, its number of steps, and the metrics of the last one."""

    outcome: SessionOutcome
    steps: int
    metrics: dict[str, float]


def train_session(
    trainer: DrafterTrainer,
    buffer: DataBuffer,
    step: int,
    entries_per_step: int,
    max_steps: int,
    should_stop: Callable[[], bool] = lambda: False,
    group: RankGroup | None = None,
) -> SessionResult:
    """Trains on a buffer until ``max_steps`` are done, a rank is told to stop, or a step ends otherwise than well.

    ``step`` is the RL step. All ranks of ``group`` call this together, each with a buffer of its own, and end
    it together: each asks ``should_stop`` before and between its micro-batches, and one is enough.
    """

    def drawn() -> Iterator[Entry]:
        yield from buffer.sample(entries_per_step, step, trainer.version)

    metrics: dict[str, float] = {}
    for done in range(max_steps):
        result = trainer.train_step(drawn(), should_stop, step, group)
        if result.outcome != "trained":
            return SessionResult(result.outcome, done, result.metrics or metrics)
        metrics = result.metrics
    return SessionResult("completed", max_steps, metrics)
