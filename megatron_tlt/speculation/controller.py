"""Chooses an engine's strategy and draft budgets before each step: combines gate, tuner, hold and length policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.length import LengthPolicy
from megatron_tlt.speculation.strategy import OFF, BudgetMix, BudgetsOf, StepRecord, Strategy
from megatron_tlt.speculation.tuner import Tuner


class SpeculationController:
    """Speculation of one engine: call ``next(batch, requests)`` before each step and ``observe(step)`` after it.

    Above the gate's batch size nothing is drafted. Below it, the tuner's choice is held for ``hold_steps`` steps,
    because the first step after a change verifies drafts of the previous strategy. A batch that grows or has halved
    ends the hold.

    Decisions depend only on the inputs. The ranks of a tensor-parallel engine measure different durations but need the
    same decision: broadcast the strategy from one rank, or give all controllers one rank's duration. Independent
    engines (data parallel) each have a controller.

    Args:
        lengths: sets draft budgets from expected response lengths; None: each request may have all drafts.

    Raises:
        ValueError: ``hold_steps`` is below 2, so that no step would be steady.
    """

    def __init__(
        self,
        tuner: Tuner,
        gate: ElasticGate | None = None,
        hold_steps: int = 4,
        lengths: LengthPolicy | None = None,
    ) -> None:
        if hold_steps < 2:
            raise ValueError(f"hold_steps is {hold_steps}; allowed: 2 and more")
        self.tuner = tuner
        self.gate = gate or ElasticGate()
        self.hold_steps = hold_steps
        self.lengths = lengths
        self.steps: Counter[str] = Counter()
        """Steps so far by strategy name."""
        self._current = OFF
        self._chosen_at = 0
        self._held = 0
        # budgets of the drafts made in the next step, and of the drafts it verifies
        self._budgets: Mapping[str, int] | None = None
        self._verified: BudgetMix | None = None

    def choose(self, batch: int, budgets: BudgetsOf | None = None) -> Strategy:
        """Return the strategy that drafts in the next step, of ``batch`` requests.

        ``budgets`` returns the requests' draft budgets under a strategy; called only if the tuner has to choose.
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

    def next(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, Mapping[str, int] | None]:
        """As ``StrategyChooser.next``."""
        # drafts of a request that has ended since are not verified
        before = self._budgets
        self._verified = None if before is None else BudgetMix.of(before[name] for name in requests if name in before)
        self._budgets = None
        if self.lengths is None:
            return self.choose(batch), None
        lengths, plan = self.lengths, None

        def budgets_of(strategy: Strategy) -> Mapping[str, int] | None:
            nonlocal plan
            if not strategy.by_length:
                return None
            if plan is None:
                for name, num_tokens in requests.items():
                    lengths.update(name, num_tokens)
                plan = lengths.plan(requests)
            return plan(strategy.num_tokens)

        def mix_of(strategy: Strategy) -> BudgetMix | None:
            budgets = budgets_of(strategy)
            return None if budgets is None else BudgetMix.of(budgets.values())

        strategy = self.choose(batch, mix_of)
        self._budgets = budgets_of(strategy)
        return strategy, self._budgets

    def make_plain(self) -> None:
        """Cancel the drafts of the next step, whatever ``next`` returned."""
        self._budgets = None

    def observe(self, step: StepRecord) -> bool:
        """Record a step; returns whether the tuner learned from it."""
        if not step.is_steady:
            return False
        if self._verified is not None:
            step = replace(step, budgets=self._verified)
        self.tuner.observe(step)
        if self.lengths is not None:
            self.lengths.observe(step)
        return True

    def begin_rollout(self, problems: Mapping[str, tuple[str, int]] | None = None) -> None:
        """Start a rollout of requests: close the gate, keep the tuner's state.

        ``problems``: the problem key of each request, and how many tokens of its response exist already.
        """
        self.gate.reset()
        self._current, self._held = OFF, 0
        self._budgets = self._verified = None
        if self.lengths is not None:
            for request_id, (problem_key, begun) in (problems or {}).items():
                self.lengths.start(request_id, problem_key, begun)

    def state(self) -> dict[str, Any]:
        """The complete learned state as JSON, kept across rollouts, RL steps and resumes."""
        controller = {
            "tuner": self.tuner.state(),
            "gate": self.gate.state(),
            "current": self._current.name,
            "chosen_at": self._chosen_at,
            "held": self._held,
            "steps": dict(self.steps),
        }
        return {"controller": controller, "lengths": None if self.lengths is None else self.lengths.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of ``state()``.

        Raises:
            ValueError: the state is from another tuner or from other strategies.
        """
        # lengths first: they are valid even if the tuner's state is rejected
        if self.lengths is not None and state["lengths"] is not None:
            self.lengths.load_state(state["lengths"])
        own = state["controller"]
        self.tuner.load_state(own["tuner"])
        self.gate.load_state(own["gate"])
        self._current = Strategy.parse(own["current"])
        self._chosen_at, self._held = int(own["chosen_at"]), int(own["held"])
        self.steps = Counter(own["steps"])
