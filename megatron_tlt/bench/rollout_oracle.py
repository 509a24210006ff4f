"""The oracle of `tlt bench rollout`: at each batch the strategy that was fastest alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megatron_tlt.bench.tuner_oracle import OracleTuner
from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.strategy import StepRecord, Strategy


class RateTable:
    """Tokens per second by strategy and batch, measured with the static strategies."""

    def __init__(self) -> None:
        self._seen: dict[Strategy, dict[int, list[tuple[float, int]]]] = {}
        self._rates: dict[tuple[Strategy, int], float] = {}

    def add(self, step: StepRecord) -> None:
        """Takes in a step, unless two strategies or a prompt share it."""
        if step.is_steady:
            self._rates.clear()
            self._seen.setdefault(step.strategy, {}).setdefault(step.batch, []).append((step.duration, step.num_tokens))

    def rate(self, strategy: Strategy, batch: int) -> float:
        """Rate at the nearest measured batch; 0 for an unmeasured strategy. Cached, as the caller is being timed."""
        if (strategy, batch) not in self._rates:
            self._rates[strategy, batch] = self._rate(strategy, batch)
        return self._rates[strategy, batch]

    def _rate(self, strategy: Strategy, batch: int) -> float:
        batches = self._seen.get(strategy)
        if not batches:
            return 0.0
        steps = batches[min(batches, key=lambda seen: (abs(seen - batch), seen))]
        return statistics.fmean(tokens for _, tokens in steps) / statistics.median(seconds for seconds, _ in steps)


class OracleChooser:
    """The best strategy of a table, without exploration: an upper bound for adaptivity."""

    def __init__(self, strategies: Sequence[Strategy], table: RateTable) -> None:
        tuner = OracleTuner(strategies, table.rate)
        self._controller = SpeculationController(tuner, ElasticGate(threshold=10**6, patience=1), hold_steps=2)

    def next(self, batch: int, requests: object) -> tuple[Strategy, None]:
        return self._controller.choose(batch), None

    def observe(self, step: StepRecord) -> None:
        """Does nothing: the oracle does not learn."""
