"""How many drafts each request is given, by the length that its response is expected to have (DAS)."""

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
# of a medium response's drafts, relative to a long one's [reconstruction]
MEDIUM_SHARE = 0.5
# before anything was fitted: six in ten of the first drafts are accepted, and a token costs a hundredth of a step
DEFAULT_CURVE = AcceptanceCurve(alpha=0.7, k=0.85)
DEFAULT_COSTS = StepCosts(base=1.0, token=0.01)
# how many observations are kept for the fits, how many a fit needs, and after how many new ones it is made again
_WINDOW = 512
_FEWEST = 16
_REFIT = 32


@dataclass
class _Running:
    problem: str
    initial: LengthClass
    num_tokens: int = 0


class LengthPolicy:
    """Budgets for the running requests, from the lengths of earlier responses.

    ``classes`` (the policy that DAS deploys): long responses have all drafts, medium ones half, short ones none.
    ``optimal`` (the closed form): the drafts that end the running batch soonest, where each request's remaining tokens
    are the median of those earlier responses that grew longer than it has, or all up to ``max_length`` where none did;
    acceptance and costs are fitted from what ``finish`` and ``observe`` are told.

    A pure function of the calls made to it. The ranks of one engine must be told the same durations.
    """

    def __init__(
        self, policy: Policy = "classes", max_length: int = 1 << 15, history: LengthHistory | None = None
    ) -> None:
        """Without any history, unless one is given.

        Raises:
            ValueError: an unknown policy, or a longest response below 1 token.
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

    def start(self, request_id: str, problem_key: str) -> LengthClass:
        """A request begins; returns its initial class, from the problem's history or, without one, from all.

        Raises:
            ValueError: it is running already.
        """
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already")
        self._running[request_id] = _Running(problem_key, self.history.initial_class(problem_key))
        return self._running[request_id].initial

    def update(self, request_id: str, num_tokens: int) -> None:
        """The request's response has ``num_tokens`` tokens now.

        Raises:
            ValueError: it is not running.
        """
        self._get(request_id).num_tokens = num_tokens

    def finish(self, request_id: str, num_tokens: int, num_draft_tokens: int = 0, num_accepted_tokens: int = 0) -> None:
        """The response is finished: all its tokens, and of its drafts all that were verified and accepted.

        Raises:
            ValueError: it is not running.
        """
        request = self._get(request_id)
        del self._running[request_id]
        self.history.add(request.problem, num_tokens, request.initial)
        if num_tokens > 0 and num_draft_tokens > 0:
            self._responses.append((num_tokens, num_draft_tokens, num_accepted_tokens))
            self._new_responses += 1

    def drop(self, request_id: str) -> None:
        """The request ended without a response to learn from (it was aborted); unknown ones are let through."""
        self._running.pop(request_id, None)

    def record(self, problem_key: str, num_tokens: int) -> None:
        """A response that ran elsewhere, on another engine, is finished."""
        self.history.add(problem_key, num_tokens)

    def observe(self, step: StepRecord) -> None:
        """Learn from a decode step what steps and tokens cost."""
        self._steps.append((step.batch + step.num_draft_tokens, step.duration))
        self._new_steps += 1

    def current_class(self, request_id: str) -> LengthClass:
        """The class that the request is in now.

        Raises:
            ValueError: it is not running.
        """
        request = self._get(request_id)
        return self.history.current_class(request.initial, request.num_tokens)

    def budgets(self, requests: Iterable[str], max_tokens: int) -> dict[str, int]:
        """Drafts of each request in the next round, in [0, ``max_tokens``].

        Raises:
            ValueError: a request is not running, or ``max_tokens`` is negative.
        """
        return self.plan(requests)(max_tokens)

    def plan(self, requests: Iterable[str]) -> Callable[[int], dict[str, int]]:
        """``budgets`` of these requests as a function of ``max_tokens``; what it does not change is computed once.

        Raises:
            ValueError: a request is not running; the function raises it where ``max_tokens`` is negative.
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
        """Fit again what enough was learnt about since the last time."""
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
        """All that it has learnt, as JSON; requests that are running are not part of it."""
        return {
            "history": self.history.state(),
            "responses": [list(response) for response in self._responses],
            "steps": [list(step) for step in self._steps],
            "curve": [self.curve.alpha, self.curve.k],
            "costs": [self.costs.base, self.costs.token],
            "new": [self._new_responses, self._new_steps],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result; requests that run go on running.

        Raises:
            ValueError: it is not one.
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
