"""Sets each request's draft budget from the expected length of its response (DAS)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_tlt.speculation.budget import (
    AcceptanceCurve,
    Budgets,
    StepCosts,
    fit_acceptance,
    fit_step_costs,
    optimal_budgets,
)
from megatron_tlt.speculation.length_classes import LengthClass, LengthHistory
from megatron_tlt.speculation.strategy import StepRecord

Policy = Literal["classes", "optimal"]
POLICIES: tuple[Policy, ...] = ("classes", "optimal")
# drafts of a medium response relative to a long one's [reconstruction]
MEDIUM_SHARE = 0.5
# before the first fit: six in ten of the first drafts are accepted, and a token costs a hundredth of a step
DEFAULT_CURVE = AcceptanceCurve(alpha=0.7, k=0.85)
DEFAULT_COSTS = StepCosts(base=1.0, token=0.01)
# observations kept for the fits, needed for a fit, and between two fits
_WINDOW = 512
_FEWEST = 16
_REFIT = 32


@dataclass
class _Running:
    problem: str
    initial: LengthClass
    begun: int = 0
    num_tokens: int = 0


class LengthPolicy:
    """Draft budgets of the running requests, from the lengths of earlier responses.

    ``classes`` (the policy that DAS deploys): long responses have all drafts, medium ones half, short ones none.
    ``optimal`` (the closed form): the budgets that end the running batch soonest. A request's remaining tokens are the
    median over earlier responses that grew longer than it is now, or all up to ``max_length`` if none did.
    Acceptance and costs are fitted to the arguments of ``finish`` and ``observe``.

    A pure function of its calls. The ranks of one engine must pass the same durations.
    """

    def __init__(
        self, policy: Policy = "classes", max_length: int = 1 << 15, history: LengthHistory | None = None
    ) -> None:
        """Start without history, unless one is given.

        Raises:
            ValueError: an unknown policy, or ``max_length`` below 1.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}: allowed are {', '.join(POLICIES)}")
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; allowed: 1 and more")
        self.policy = policy
        self.history = history or LengthHistory()
        self.curve, self.costs = DEFAULT_CURVE, DEFAULT_COSTS
        self._max_length = max_length
        self._running: dict[str, _Running] = {}
        self._responses: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)
        self._steps: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._new_responses = self._new_steps = 0

    def start(self, request_id: str, problem_key: str, begun: int = 0) -> LengthClass:
        """Start a request; returns its initial class, from the problem's history or, without one, from all responses.

        ``begun``: tokens of its response that an earlier rollout decoded.

        Raises:
            ValueError: it is already running.
        """
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already")
        self._running[request_id] = _Running(problem_key, self.history.initial_class(problem_key), begun, begun)
        return self._running[request_id].initial

    def update(self, request_id: str, num_tokens: int) -> None:
        """Set the number of tokens of a request's response that this rollout decoded.

        Raises:
            ValueError: it is not running.
        """
        request = self._get(request_id)
        request.num_tokens = request.begun + num_tokens

    def finish(self, request_id: str, num_tokens: int, num_draft_tokens: int = 0, num_accepted_tokens: int = 0) -> None:
        """Finish a request: all tokens of its response, and its verified and accepted draft tokens.

        Raises:
            ValueError: it is not running.
        """
        request = self._get(request_id)
        del self._running[request_id]
        self.history.add(request.problem, num_tokens, request.initial)
        if num_tokens > 0 and num_draft_tokens > 0:
            self._responses.append((num_tokens, num_draft_tokens, num_accepted_tokens))
            self._new_responses += 1

    def abort(self, request_id: str, num_tokens: int) -> None:
        """End a request that was aborted after ``num_tokens`` tokens.

        Its length is known to be greater (it is censored). It counts as the median of the lengths above: the problem's,
        else its class's, else all. Without any, nothing is learned.

        Raises:
            ValueError: it is not running.
        """
        request = self._get(request_id)
        del self._running[request_id]
        self._add_aborted(request.problem, request.initial, num_tokens)

    def drop(self, request_id: str) -> None:
        """End a request without learning from its response; unknown requests are ignored."""
        self._running.pop(request_id, None)

    def record(self, problem_key: str, num_tokens: int) -> None:
        """Record a response that finished on another engine."""
        self.history.add(problem_key, num_tokens)

    def record_aborted(self, problem_key: str, num_tokens: int) -> None:
        """Record a response that was aborted after ``num_tokens`` tokens, as ``abort`` does, once it has left."""
        self._add_aborted(problem_key, self.history.initial_class(problem_key), num_tokens)

    def _add_aborted(self, problem: str, initial: LengthClass, num_tokens: int) -> None:
        expected = self.history.expected_length(problem, initial, num_tokens) if num_tokens else None
        if expected is not None:
            self.history.add(problem, expected, initial)

    def observe(self, step: StepRecord) -> None:
        """Learn the costs of steps and tokens from a decode step."""
        self._steps.append((step.batch + step.num_draft_tokens, step.duration))
        self._new_steps += 1

    def current_class(self, request_id: str) -> LengthClass:
        """The current class of a request.

        Raises:
            ValueError: it is not running.
        """
        request = self._get(request_id)
        return self.history.current_class(request.initial, request.num_tokens)

    def budgets(self, requests: Iterable[str], max_tokens: int) -> dict[str, int]:
        """Draft budget of each request in the next step, in [0, ``max_tokens``].

        Raises:
            ValueError: a request is not running, or ``max_tokens`` is negative.
        """
        return self.plan(requests)(max_tokens)

    def plan(self, requests: Iterable[str]) -> Callable[[int], dict[str, int]]:
        """``budgets`` of these requests as a function of ``max_tokens``; computes everything else only once.

        Raises:
            ValueError: a request is not running; the function raises it if ``max_tokens`` is negative.
        """
        ids = list(requests)
        shares, optimum = [], Budgets(0.0, ())
        if self.policy == "classes":
            share_of = {LengthClass.SHORT: 0.0, LengthClass.MEDIUM: MEDIUM_SHARE, LengthClass.LONG: 1.0}
            shares = [share_of[self.current_class(name)] for name in ids]
        else:
            self._fit()
            remaining = [self._remaining(self._get(name)) for name in ids]
            optimum = optimal_budgets(remaining, [self.curve] * len(ids), self.costs)

        def budgets(max_tokens: int) -> dict[str, int]:
            if max_tokens < 0:
                raise ValueError(f"max_tokens is {max_tokens}; allowed: 0 and more")
            if self.policy == "classes":
                return {name: math.floor(share * max_tokens + 0.5) for name, share in zip(ids, shares, strict=True)}
            return dict(zip(ids, optimum.per_round(max_tokens), strict=True))

        return budgets

    def _remaining(self, request: _Running) -> int:
        expected = self.history.expected_length(request.problem, request.initial, request.num_tokens)
        return max(1, (self._max_length if expected is None else expected) - request.num_tokens)

    def _fit(self) -> None:
        """Repeat the fits that have enough new observations."""
        if self._new_responses >= _REFIT or (self.curve is DEFAULT_CURVE and len(self._responses) >= _FEWEST):
            self._new_responses = 0
            self.curve = fit_acceptance(*zip(*self._responses, strict=True)) or self.curve
        if self._new_steps >= _REFIT or (self.costs is DEFAULT_COSTS and len(self._steps) >= _FEWEST):
            self._new_steps = 0
            self.costs = fit_step_costs(*zip(*self._steps, strict=True)) or self.costs

    def _get(self, request_id: str) -> _Running:
        if request_id not in self._running:
            raise ValueError(f"request {request_id!r} is not running; {len(self._running)} others are")
        return self._running[request_id]

    def state(self) -> dict[str, Any]:
        """The learned state as JSON, without running requests."""
        return {
            "history": self.history.state(),
            "responses": [list(response) for response in self._responses],
            "steps": [list(step) for step in self._steps],
            "curve": [self.curve.alpha, self.curve.k],
            "costs": [self.costs.base, self.costs.token],
            "new": [self._new_responses, self._new_steps],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()``; running requests are kept.

        Raises:
            ValueError: the state is malformed.
        """
        try:
            responses = [_row(row, 3) for row in state["responses"]]
            steps = [_row(row, 2) for row in state["steps"]]
            curve, costs = AcceptanceCurve(*_row(state["curve"], 2)), StepCosts(*_row(state["costs"], 2))
            new_responses, new_steps = (int(number) for number in _row(state["new"], 2))
            self.history.load_state(state["history"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of a length policy: {error!r}") from error
        self.curve = DEFAULT_CURVE if curve == DEFAULT_CURVE else curve
        self.costs = DEFAULT_COSTS if costs == DEFAULT_COSTS else costs
        self._responses = deque(((int(n), int(p), int(a)) for n, p, a in responses), maxlen=_WINDOW)
        self._steps = deque(((int(n), float(t)) for n, t in steps), maxlen=_WINDOW)
        self._new_responses, self._new_steps = new_responses, new_steps


def _row(values: Sequence[Any], length: int) -> tuple[Any, ...]:
    row = tuple(values)
    if len(row) != length or not all(isinstance(value, int | float) for value in row):
        raise ValueError(f"{values!r}; allowed: {length} numbers")
    return row
