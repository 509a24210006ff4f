"""A tuner with one fixed strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_tlt.speculation.buckets import within_budget
from megatron_tlt.speculation.options import check_at_least, check_state
from megatron_tlt.speculation.strategy import OFF, BudgetsOf, StepRecord, Strategy


@dataclass(frozen=True)
class StaticOptions:
    """``token_budget`` bounds batch times tokens to verify; above it nothing is drafted (None: no bound)."""

    token_budget: int | None = None

    def __post_init__(self) -> None:
        check_at_least("tuner static", 1, token_budget=self.token_budget)


class StaticTuner:
    """Chooses its only strategy wherever the token budget allows it."""

    def __init__(
        self, strategies: Sequence[Strategy], options: StaticOptions | None = None, seed: int = 0, *, max_batch: int
    ) -> None:
        """Above ``max_batch`` it chooses "off".

        Raises:
            ValueError: there is not exactly one strategy.
        """
        if len(strategies) != 1:
            names = ", ".join(strategy.name for strategy in strategies) or "none"
            raise ValueError(f"tuner static: the strategies are {names}; allowed: exactly one")
        self._strategy = strategies[0]
        self._options = options or StaticOptions()
        self._max_batch = max_batch
        self._withheld: frozenset[str] = frozenset()

    @property
    def strategies(self) -> Sequence[Strategy]:
        return (self._strategy,)

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        if batch > self._max_batch:
            return OFF
        return within_budget(self.strategies, batch, self._options.token_budget, self._withheld)[0]

    def observe(self, step: StepRecord) -> None:
        pass

    def drafter_changed(self, drafter: str) -> None:
        pass

    def withhold(self, drafters: Collection[str]) -> None:
        self._withheld = frozenset(drafters)

    def state(self) -> dict[str, Any]:
        return {"tuner": "static", "strategies": [self._strategy.name]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        check_state(state, "static", self.strategies)
