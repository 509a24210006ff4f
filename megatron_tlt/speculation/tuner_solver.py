"""Selects the strategy with the best speed-up, fitted from one profiling pass (ReSpec, adaptive solver)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_tlt.speculation.acceptance import AcceptanceLengths
from megatron_tlt.speculation.buckets import within_budget
from megatron_tlt.speculation.options import check_at_least, check_state
from megatron_tlt.speculation.step_times import StepTimes
from megatron_tlt.speculation.strategy import OFF, BudgetMix, BudgetsOf, StepRecord, Strategy

_FORMER_GRID = (1, 4, 16)
"""Grid batches of earlier releases' states, which do not record them."""


@dataclass(frozen=True)
class SolverOptions:
    """Options of ``SolverTuner``.

    Attributes:
        batches: the grid's batch sizes; None: the powers of four up to the largest batch.
        samples: steps needed per cell (strategy, batch) of the grid.
        inline: profile during rollouts, at the batches that occur; else ``wanted`` lists cells for a separate pass.
        refresh: steps between checks of every source's acceptance; a drift triggers a check at once.
        half_life: half-life of the acceptance estimate, in steps.
        drift: standard deviations by which the latest steps must contradict the earlier ones.
        token_budget: upper bound of batch times tokens to verify; None: no bound.
    """

    batches: tuple[int, ...] | None = None
    samples: int = 3
    inline: bool = True
    refresh: int = 200
    half_life: int = 300
    drift: float = 3.5
    token_budget: int | None = None

    def __post_init__(self) -> None:
        if self.batches is not None:
            object.__setattr__(self, "batches", tuple(sorted(set(self.batches))))
            if not self.batches:
                raise ValueError("tuner solver: batches is empty; allowed: one and more")
            check_at_least("tuner solver", 1, batches=self.batches[0])
        check_at_least("tuner solver", 1, samples=self.samples, refresh=self.refresh)
        check_at_least("tuner solver", 1, half_life=self.half_life, token_budget=self.token_budget)
        check_at_least("tuner solver", 0, drift=self.drift)


class SolverTuner:
    """argmax over strategies of fitted tokens per step over fitted step time; "off" if no speed-up is above 1.

    It profiles instead of exploring, and ordinary steps refine the fit. The acceptance of unused sources is remeasured
    with one strategy of each, after a drift and every ``refresh`` steps.
    """

    def __init__(
        self, strategies: Sequence[Strategy], options: SolverOptions | None = None, seed: int = 0, *, max_batch: int
    ) -> None:
        """For batches up to ``max_batch``; the tuner chooses "off" for larger ones.

        Raises:
            ValueError: "off", the reference of the speed-up, is not a strategy, or the grid has a larger batch.
        """
        self._strategies = tuple(dict.fromkeys(strategies))
        if OFF not in self._strategies:
            names = ", ".join(strategy.name for strategy in strategies) or "none"
            raise ValueError(f"tuner solver: the strategies are {names}; off must be among them")
        self._options = options or SolverOptions()
        self._max_batch = max_batch
        self._grid = self._options.batches or tuple(4**i for i in range(max_batch.bit_length()) if 4**i <= max_batch)
        if self._grid[-1] > max_batch:
            raise ValueError(
                f"tuner solver: batches are {list(self._grid)}; allowed: up to {max_batch}, the largest batch that "
                "speculates (threshold + hysteresis of the gate)"
            )
        # plain steps just above the largest batch still show the cost of a request
        self._times = StepTimes(self._strategies, max_batch=2 * max_batch)
        self._lengths = AcceptanceLengths(self._options.half_life, self._options.drift)
        self._steps = 0
        self._missing = self._all_missing()
        self._stale: dict[str, int] = {}
        self._refreshed = 0
        self._withheld: frozenset[str] = frozenset()

    def _all_missing(self) -> dict[tuple[Strategy, int], int]:
        """Steps that each cell (strategy, batch) of the grid needs before profiling."""
        return {
            (strategy, batch): self._options.samples
            for batch in self._grid
            for strategy in self._strategies
            if within_budget([strategy], batch, self._options.token_budget) == [strategy]
        }

    @property
    def strategies(self) -> Sequence[Strategy]:
        return self._strategies

    def wanted(self) -> list[tuple[Strategy, int]]:
        """Cells (strategy, batch) that still need steps, in order."""
        return list(self._missing)

    def speedup(self, strategy: Strategy, batch: int, budgets: BudgetMix | None = None) -> float:
        """Expected tokens per second relative to "off", over the requests that may have drafts."""
        plain = self._times.predict(OFF, batch)[0]
        length, _ = self._lengths.predict(strategy, None if budgets is None else budgets.drafted_only())
        return length * plain / self._times.predict(strategy, batch, None if budgets is None else budgets.mean)[0]

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        if batch > self._max_batch:
            return OFF
        arms = within_budget(self._strategies, batch, self._options.token_budget, self._withheld)
        if self._options.inline:
            for strategy in arms:
                if (strategy, self._nearest(batch)) in self._missing:
                    return strategy
        speedups = {arm: self.speedup(arm, batch, budgets(arm) if budgets is not None else None) for arm in arms}
        best = max(arms, key=lambda arm: (speedups[arm], arm == OFF))
        for source in self._stale:
            own = [arm for arm in arms if arm.source == source]
            if own and source != best.source:
                return max(own, key=speedups.__getitem__)
        return best if speedups[best] > 1.0 else OFF

    def _nearest(self, batch: int) -> int:
        """The grid batch that represents this batch."""
        return min(self._grid, key=lambda b: (abs(b - batch) / (b + batch), b))

    def observe(self, step: StepRecord) -> None:
        if step.strategy not in self._strategies:
            return
        self._steps += 1
        self._times.observe(step.strategy, step.batch, step.duration, step.mean_budget)
        drifted = self._lengths.observe(step)
        cell = (step.strategy, self._nearest(step.batch))
        if step.batch <= self._max_batch and cell in self._missing:
            self._missing[cell] -= 1
            if self._missing[cell] == 0:
                del self._missing[cell]
        source = step.strategy.source
        if source in self._stale:
            self._stale[source] -= 1
            if self._stale[source] == 0:
                del self._stale[source]
        if drifted or self._steps - self._refreshed >= self._options.refresh:
            self._refreshed = self._steps
            sources = {s.source for s in self._strategies} - {OFF.source, source}
            self._stale = dict.fromkeys(sorted(sources), self._options.samples)

    def drafter_changed(self, drafter: str) -> None:
        self._lengths.renew(drafter)
        changed = sorted({strategy.source for strategy in self._strategies if strategy.uses([drafter])})
        self._stale |= dict.fromkeys(changed, self._options.samples)

    def withhold(self, drafters: Collection[str]) -> None:
        self._withheld = frozenset(drafters)

    def state(self) -> dict[str, Any]:
        return {
            "tuner": "solver",
            "strategies": [strategy.name for strategy in self._strategies],
            "steps": self._steps,
            "refreshed": self._refreshed,
            "grid": list(self._grid),
            "missing": [[strategy.name, batch, count] for (strategy, batch), count in self._missing.items()],
            "stale": list(self._stale.items()),
            "times": self._times.state(),
            "lengths": self._lengths.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        check_state(state, "solver", self._strategies)
        self._steps, self._refreshed = int(state["steps"]), int(state["refreshed"])
        # batches missing from the state's grid must be profiled; earlier releases had one grid for all gates
        known = set(state.get("grid", _FORMER_GRID))
        missing = {(Strategy.parse(name), int(batch)): int(count) for name, batch, count in state["missing"]}
        self._missing = {
            cell: missing.get(cell, count)
            for cell, count in self._all_missing().items()
            if cell in missing or cell[1] not in known
        }
        self._stale = {source: int(count) for source, count in state["stale"]}
        self._times.load_state(state["times"])
        self._lengths.load_state(state["lengths"])
