"""Knows the truth; for benchmarks, which measure the others against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_tlt.speculation.buckets import within_budget
from megatron_tlt.speculation.options import check_state
from megatron_tlt.speculation.strategy import BudgetsOf, StepRecord, Strategy


class OracleTuner:
    """The strategy of the highest ``rate(strategy, batch)``, expected tokens per second as they are at the moment."""

    def __init__(
        self,
        strategies: Sequence[Strategy],
        rate: Callable[[Strategy, int], float],
        token_budget: int | None = None,
    ) -> None:
        """
        Raises:
            ValueError: there are no strategies.
        """
        if not strategies:
            raise ValueError("tuner oracle: there are no strategies; at least one is needed")
        self._strategies = tuple(strategies)
        self._rate = rate
        self._token_budget = token_budget
        self._withheld: frozenset[str] = frozenset()

    @property
    def strategies(self) -> Sequence[Strategy]:
        return self._strategies

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        arms = within_budget(self._strategies, batch, self._token_budget, self._withheld)
        return max(arms, key=lambda strategy: self._rate(strategy, batch))

    def observe(self, step: StepRecord) -> None:
        pass

    def drafter_changed(self, drafter: str) -> None:
        pass

    def withhold(self, drafters: Collection[str]) -> None:
        self._withheld = frozenset(drafters)

    def state(self) -> dict[str, Any]:
        return {"tuner": "oracle", "strategies": [strategy.name for strategy in self._strategies]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        check_state(state, "oracle", self._strategies)
