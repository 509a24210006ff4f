"""What an engine asks before each of its steps: gate, tuner and hold put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.strategy import OFF, BudgetsOf, StepRecord, Strategy
from megatron_tlt.speculation.tuner import Tuner


class SpeculationController:
    """``next(batch)`` before each engine step, ``observe(step)`` after it.

    Above the gate nothing is drafted. Below it the tuner's choice is held for ``hold_steps`` steps, as the first step
    after a change belongs to no strategy alone; a batch that grows, or that has halved, ends the hold.

    Decisions depend on nothing but what it is given. The ranks of a tensor-parallel engine measure different durations
    but must decide alike: have one rank ask a controller and broadcast the strategy, or give all ranks' controllers
    one rank's duration. Independent engines (data parallel) have a controller each.
    """

    def __init__(self, tuner: Tuner, gate: ElasticGate | None = None, hold_steps: int = 4) -> None:
        """
        Raises:
            ValueError: ``hold_steps`` is below 2: no step would ever be steady.
        """
        if hold_steps < 2:
            raise ValueError(f"hold_steps is {hold_steps}; allowed: 2 and more")
        self.tuner = tuner
        self.gate = gate or ElasticGate()
        self.hold_steps = hold_steps
        self.steps: Counter[str] = Counter()
        """Steps so far by the name of the strategy."""
        self._current = OFF
        self._chosen_at = 0
        self._held = 0

    def next(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        """The strategy that drafts in the step to come, of this many requests.

        ``budgets`` are the requests' draft budgets under each strategy; it is called only where a choice is made.
        """
        if not self.gate.update(batch):
            self._current, self._held = OFF, 0
        elif self._held == 0 or batch > self._chosen_at or 2 * batch <= self._chosen_at:
            self._current = self.tuner.choose(max(batch, 1), budgets)
            self._chosen_at, self._held = batch, self.hold_steps - 1
        else:
            self._held -= 1
        self.steps[self._current.name] += 1
        return self._current

    def observe(self, step: StepRecord) -> bool:
        """Take in a step; whether the tuner learnt from it."""
        if not step.is_steady:
            return False
        self.tuner.observe(step)
        return True

    def drafter_changed(self, drafter: str) -> None:
        """The drafter of this name has new weights."""
        self.tuner.drafter_changed(drafter)

    def withhold(self, drafters: Collection[str]) -> None:
        """As ``Tuner.withhold``; between rollouts."""
        self.tuner.withhold(drafters)

    def begin_rollout(self) -> None:
        """A new rollout begins: the gate closes, what the tuner has learnt stays."""
        self.gate.reset()
        self._current, self._held = OFF, 0

    def state(self) -> dict[str, Any]:
        """As JSON: to be kept across rollouts, RL steps and resumes."""
        return {
            "tuner": self.tuner.state(),
            "gate": self.gate.state(),
            "current": self._current.name,
            "chosen_at": self._chosen_at,
            "held": self._held,
            "steps": dict(self.steps),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result.

        Raises:
            ValueError: it is of another tuner, or over other strategies.
        """
        self.tuner.load_state(state["tuner"])
        self.gate.load_state(state["gate"])
        self._current = Strategy.parse(state["current"])
        self._chosen_at, self._held = int(state["chosen_at"]), int(state["held"])
        self.steps = Counter(state["steps"])
