"""Schedules of strategies for tests of engines."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy


class RandomChooser:
    """Draws a strategy every ``every`` steps, and now and then budgets for some requests; keeps what it saw."""

    def __init__(self, strategies: Sequence[Strategy], seed: int, every: int = 3, budgets: bool = True) -> None:
        self._random = random.Random(seed)
        self._strategies = strategies
        self._every = every
        self._with_budgets = budgets
        self._strategy, self._budgets = OFF, None
        self._step = 0
        self.records: list[StepRecord] = []
        self.batches: list[tuple[int, int]] = []

    def next(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, Mapping[str, int] | None]:
        self.batches.append((batch, len(requests)))
        if self._step % self._every == 0:
            self._strategy, self._budgets = self._random.choice(self._strategies), None
            if self._with_budgets and requests and self._strategy != OFF and self._random.random() < 0.5:
                chosen = self._random.sample(sorted(requests), (len(requests) + 1) // 2)
                self._budgets = {name: self._random.randint(0, self._strategy.num_tokens) for name in chosen}
        self._step += 1
        return self._strategy, self._budgets

    def observe(self, step: StepRecord) -> None:
        self.records.append(step)

    def drafts_of(self, source: str) -> tuple[int, int]:
        """(drafted, accepted) tokens of the steps that verified drafts of this ``Strategy.source``."""
        steps = [step for step in self.records if step.strategy.source == source]
        return sum(step.num_draft_tokens for step in steps), sum(step.num_accepted_tokens for step in steps)
