"""A session: consecutive steps of drafter training on data of a buffer."""

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
    """Outcome of a session, its number of steps, and the metrics of the last step."""

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
    """Train on a buffer until ``max_steps`` are done, a rank has to stop, or a step is not successful.

    ``step`` is the RL step. All ranks of ``group`` call this together, each with its own buffer, and return together.
    Each rank calls ``should_stop`` before and between its micro-batches; True on one rank stops all.
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
