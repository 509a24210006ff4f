"""Rounds in which responses race, by the product's own schedulers: tail batching and bounded asynchrony.

Responses race by tokens, and an engine aborts what cannot be kept. So each response decodes a number of tokens that
follows from the lengths alone: to its end, to the finish of its problem, or to that of the last winner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.config.schedule import ScheduleConfig
from megatron_tlt.config.tail import MAX_STALENESS
from megatron_tlt.planning.simulation.scenario import Scenario
from megatron_tlt.tasks.rounds import AheadScheduler, TailRound, TailScheduler, TailState

Array = NDArray[np.float64]
RoundKind = Literal["tail", "continue", "partial", "one_step_off"]
"""``tail`` generates what rounds left anew; the others continue it."""


def race(asked: TailRound, left_PR: Array) -> tuple[NDArray[np.intp], Array]:
    """The winners of a round and the tokens that each response decodes; pure, as ``tasks.rounds.TokenRace``.

    Args:
        asked: the round, of P problems and R responses to each.
        left_PR: tokens until each response ends.

    Returns:
        Positions of the winners, ascending; the tokens (P, R).
    """
    if asked.is_long:
        return np.arange(len(left_PR)), left_PR
    finish_P = np.partition(left_PR, asked.keep_samples - 1, axis=1)[:, asked.keep_samples - 1]
    at = np.arange(len(finish_P))
    winners = np.lexsort((at, finish_P, at >= asked.must))[: asked.keep_problems]
    others = np.sort(finish_P[asked.must :])
    places = asked.keep_problems - asked.must
    limit = float(others[places - 1]) if places else 0.0
    # nothing is limited before the problems that must win have finished
    cut = max(limit, float(finish_P[: asked.must].max(initial=0.0)))
    return np.sort(winners), np.minimum(left_PR, np.minimum(cut, finish_P)[:, None])


@dataclass
class _Problem:
    """A problem that was drawn."""

    common: float
    """The shared part of its responses' lengths, as a standard normal variable."""
    lengths: Array
    done: Array
    """Tokens that rounds have decoded of each response."""
    begun: int
    """The step of the oldest of these tokens."""


@dataclass(frozen=True)
class DecodedRound:
    """Lengths (P, R) of a round's responses at its end, the tokens that it decoded of them, and which are kept."""

    reached: Array
    decoded: Array
    kept: Array
    """Lengths of the responses used for training, problem after problem."""
    ended: NDArray[np.bool_]
    """Which responses are at their end, (P, R)."""
    is_long: bool
    """All of them are kept."""


@dataclass
class RacingRounds:
    """Step after step of one kind of rounds."""

    scenario: Scenario
    kind: RoundKind
    rng: np.random.Generator
    state: TailState = field(default_factory=TailState)
    _problems: dict[int, _Problem] = field(default_factory=dict)
    _step: int = 0

    def __post_init__(self) -> None:
        one = self.scenario
        self._scheduler: TailScheduler | AheadScheduler
        if self.kind == "partial" or self.kind == "one_step_off":
            given = one.schedule if one.schedule is not None and one.schedule.kind == self.kind else None
            settings = given or ScheduleConfig(kind=self.kind)
            self._scheduler = AheadScheduler(settings, one.prompts, one.group)
            self._most = settings.max_staleness
        else:
            self._scheduler = TailScheduler(one.tail, one.prompts, one.group)
            self._most = one.tail.max_staleness or MAX_STALENESS

    def next(self) -> DecodedRound:
        """The next step's round."""
        one = self.scenario
        due = {index for index in self.state.deferred if self._step - self._problems[index].begun == self._most}
        asked = self._scheduler.round(self.state, due)
        problems = [self._take(index, asked.samples) for index in asked.problems]
        lengths, done = (np.stack([getattr(each, name) for each in problems]) for name in ("lengths", "done"))
        winners, decoded = race(asked, lengths - done)
        for at, each in enumerate(problems):
            each.done = each.done + decoded[at] if self.kind != "tail" else each.done
        kept = np.take_along_axis(
            lengths[winners], np.argsort((lengths - done)[winners], axis=1, kind="stable")[:, : one.group], axis=1
        )
        for at in winners:
            del self._problems[asked.problems[at]]
        self.state = self._scheduler.after(self.state, asked, winners.tolist())
        self._step += 1
        return DecodedRound(done + decoded, decoded, kept.ravel(), done + decoded >= lengths, asked.is_long)

    def _take(self, index: int, samples: int) -> _Problem:
        """A problem with lengths for a round: new ones, or those of responses that are continued."""
        known = self._problems.get(index)
        if known is not None and self.kind != "tail" and self._step - known.begun <= self._most:
            known.lengths, known.done = known.lengths[:samples], known.done[:samples]
            return known
        common, lengths = self._draw(samples, None if known is None else known.common)
        self._problems[index] = _Problem(common, lengths, np.zeros(samples), self._step)
        return self._problems[index]

    def _draw(self, samples: int, common: float | None) -> tuple[float, Array]:
        """The shared part of a problem's lengths, new unless given, and the lengths of so many responses to it."""
        shared = np.sqrt(self.scenario.constants.group_correlation)
        common = float(self.rng.standard_normal()) if common is None else common
        own = self.rng.standard_normal(samples) * np.sqrt(1.0 - shared**2)
        return common, self.scenario.lengths.at(shared * common + own, self.scenario.max_response_tokens)
