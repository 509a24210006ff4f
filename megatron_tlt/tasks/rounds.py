"""Tail batching (Gao et al. 2025, RollPacker, arXiv:2509.21009, section 4): short rounds leave long problems for later.

A short round asks for more than a step needs and keeps what ends first. The problems that it leaves are generated anew
in a long round, by the policy of that step, once they fill a step. Here responses race by their numbers of tokens and
not by time: what is kept is a function of the responses alone, whatever engines decode them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_tlt.config.rounding import times_at_least
from megatron_tlt.config.schedule import ScheduleConfig
from megatron_tlt.config.tail import TailConfig

_ETA_PROMPTS = 1.5
Key = tuple[int, int]
"""Position of a problem in its round, and number of its response."""


@dataclass(frozen=True)
class TailState:
    """``next_problem`` has not been drawn yet; ``deferred`` ones have, and no step has trained on them."""

    next_problem: int = 0
    deferred: tuple[int, ...] = ()


@dataclass(frozen=True)
class TailRound:
    """What to ask for, and how many of it to keep.

    Args:
        problems: indices of the training problems.
        samples: responses to each.
        keep_problems: problems of a step.
        keep_samples: responses to each problem that a step trains on.
        must: see below.
        by_time: see below.
    """

    problems: tuple[int, ...]
    samples: int
    keep_problems: int
    keep_samples: int
    must: int = 0
    """So many of the first problems win, however long they take; the others race for the rest."""
    by_time: bool = False
    """Whether responses race by milliseconds in place of tokens."""

    @property
    def size(self) -> tuple[int, int]:
        """Problems, and responses to each."""
        return len(self.problems), self.samples

    @property
    def is_long(self) -> bool:
        """Whether all of it is kept, so that nothing races."""
        return self.size == (self.keep_problems, self.keep_samples)


class TailScheduler:
    """Which problems a step asks for; pure.

    Args:
        settings: the section ``tail``.
        prompts: problems of a step.
        group: responses to each.
    """

    def __init__(self, settings: TailConfig, prompts: int, group: int) -> None:
        self._prompts, self._group = prompts, group
        self._asked_prompts = times_at_least(settings.eta_prompts, prompts)
        self._asked_group = times_at_least(settings.eta_responses, group)
        self._by_time = settings.race == "time"

    def round(self, state: TailState, due: Collection[int] = ()) -> TailRound:
        """A long round if the deferred problems fill a step, otherwise a short one of new problems."""
        if len(state.deferred) >= self._prompts:
            return TailRound(state.deferred[: self._prompts], self._group, self._prompts, self._group)
        new = range(state.next_problem, state.next_problem + self._asked_prompts)
        return TailRound(tuple(new), self._asked_group, self._prompts, self._group, by_time=self._by_time)

    def after(self, state: TailState, asked: TailRound, kept: Sequence[int]) -> TailState:
        """The state after a round that kept the problems at the positions ``kept``."""
        if asked.is_long and asked.problems == state.deferred[: self._prompts]:
            return TailState(state.next_problem, state.deferred[self._prompts :])
        left = tuple(problem for at, problem in enumerate(asked.problems) if at not in kept)
        return TailState(state.next_problem + len(asked.problems), (*state.deferred, *left))


class AheadScheduler:
    """Which problems a step asks for under bounded asynchrony (section ``schedule``); pure.

    A step asks for what earlier steps left, in their order, and for new problems. ``partial`` trains on those that
    finish at the fewest tokens, and on those that would otherwise get too old; ``one_step_off`` on what the step before
    began.

    Args:
        settings: the section.
        prompts: problems of a step.
        group: responses to each.
    """

    def __init__(self, settings: ScheduleConfig, prompts: int, group: int) -> None:
        self._prompts, self._group, self._first = prompts, group, settings.kind == "one_step_off"
        self._asked = 2 * prompts if self._first else times_at_least(settings.eta_prompts or _ETA_PROMPTS, prompts)

    def round(self, state: TailState, due: Collection[int] = ()) -> TailRound:
        """What was left, and new problems up to the number that a step asks for.

        Args:
            state: the problems that wait.
            due: of these, those that the next step could not continue any more.
        """
        ordered = sorted(state.deferred, key=lambda problem: problem not in due)
        left = ordered[: self._asked]
        new = range(state.next_problem, state.next_problem + self._asked - len(left))
        must = self._prompts if self._first else min(self._prompts, sum(problem in due for problem in left))
        return TailRound((*left, *new), self._group, self._prompts, self._group, must)

    def after(self, state: TailState, asked: TailRound, kept: Sequence[int]) -> TailState:
        """The state after a round that kept the problems at the positions ``kept``."""
        left = tuple(problem for at, problem in enumerate(asked.problems) if at not in kept)
        new = sum(problem >= state.next_problem for problem in asked.problems)
        waiting = tuple(problem for problem in state.deferred if problem not in asked.problems)
        return TailState(state.next_problem + new, (*left, *waiting))


@dataclass
class TokenRace:
    """The race of a short round, as one engine sees it; pure.

    A problem finishes with its ``keep_samples``-th shortest response; the ``keep_problems`` problems that finish at
    the fewest tokens win, of equal ones those that come first in the round. ``limit`` is the number of tokens at which
    the last winner known so far finished: it only falls, and a stale one costs time, not correctness.

    Args:
        samples: responses to each problem.
        keep_problems: how many problems win.
        keep_samples: responses that a problem needs.
        must: so many of the first problems win; nothing is limited before all of them have finished.
    """

    samples: int
    keep_problems: int
    keep_samples: int
    must: int = 0
    _finished: dict[int, dict[int, int]] = field(default_factory=dict)
    _aborted: dict[int, set[int]] = field(default_factory=dict)
    _finishes: dict[int, int] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Tokens; infinity while fewer problems than win have finished."""
        if any(at not in self._finishes for at in range(self.must)):
            return math.inf
        others = sorted(tokens for at, tokens in self._finishes.items() if at >= self.must)
        places = self.keep_problems - self.must
        if not places:
            return 0
        return others[places - 1] if len(others) >= places else math.inf

    @property
    def finishes(self) -> dict[int, int]:
        """Tokens at which problems finished, by position."""
        return self._finishes

    def finished(self, key: Key, tokens: int) -> bool:
        """Accounts for a response; returns whether its problem's finish is new or earlier than it was."""
        problem, sample = key
        lengths = self._finished.setdefault(problem, {})
        lengths[sample] = tokens
        if len(lengths) < self.keep_samples:
            return False
        return self.learn({problem: sorted(lengths.values())[self.keep_samples - 1]})

    def learn(self, finishes: Mapping[int, int]) -> bool:
        """Accounts for problems that finished in this or another engine; returns whether that is news."""
        news = {at: tokens for at, tokens in finishes.items() if tokens < self._finishes.get(at, math.inf)}
        self._finishes |= news
        return bool(news)

    def lost(self, unfinished: Mapping[Key, int]) -> list[Key]:
        """Which unfinished responses cannot be kept, given their tokens so far; each is returned once."""
        if not self._finishes:  # nothing limits them
            return []
        limit, found = self.limit, []
        for key, tokens in unfinished.items():
            # it ends at more than ``tokens``
            if tokens >= min(limit, self._finishes.get(key[0], math.inf)):
                found += self._abort(key)
        out = {problem for problem in {at for at, _ in unfinished} if self._is_out(problem, limit)}
        for key in unfinished:
            if key[0] in out:
                found += self._abort(key)
        return found

    def _abort(self, key: Key) -> list[Key]:
        aborted = self._aborted.setdefault(key[0], set())
        if key[1] in aborted:
            return []
        aborted.add(key[1])
        return [key]

    def _is_out(self, problem: int, limit: float) -> bool:
        """Whether too many of its responses are longer than the limit."""
        short = sum(tokens <= limit for tokens in self._finished.get(problem, {}).values())
        undecided = self.samples - len(self._finished.get(problem, ())) - len(self._aborted.get(problem, ()))
        return short + undecided < self.keep_samples


def select(asked: TailRound, lengths: Mapping[Key, int]) -> list[Key]:
    """What a step trains on, ascending: the winners of :class:`TokenRace` and their shortest responses.

    Args:
        asked: the round.
        lengths: tokens of the finished responses; aborted ones are absent.

    Raises:
        ValueError: too few problems have enough finished responses.
    """
    finished: dict[int, list[tuple[int, int]]] = {}
    for (problem, sample), tokens in lengths.items():
        finished.setdefault(problem, []).append((tokens, sample))
    best = {at: sorted(rows)[: asked.keep_samples] for at, rows in finished.items() if len(rows) >= asked.keep_samples}
    winners = sorted(best, key=lambda at: (at >= asked.must, best[at][-1][0], at))[: asked.keep_problems]
    if any(at not in best for at in range(asked.must)):
        winners = []
    if len(winners) < asked.keep_problems:
        raise ValueError(f"{len(winners)} problems have {asked.keep_samples} responses; needed: {asked.keep_problems}")
    return sorted((at, sample) for at in winners for _, sample in best[at])
