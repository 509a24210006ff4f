"""Lengths of a real policy's responses (``tools/record_lengths.py``), replayed at any number of responses."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from importlib import resources

import numpy as np

from megatron_tlt.bench.rollout_cases import of_length
from megatron_tlt.planning.simulation.constants import shipped
from megatron_tlt.planning.simulation.lengths import LongTail, draw
from megatron_tlt.rollout.types import Request

RECORDED = "quickstart"
LAWS = (RECORDED, "smollm2", "32k")
"""Lengths recorded from the quickstart's policy or from SmolLM2's, or those of long responses in TLT's runs."""


class RecordedLengths:
    """Gives the requests of a rollout the lengths of one recorded rollout.

    Fewer responses than were recorded keep the distribution: they are taken in equal steps through its lengths from the
    longest on, and assigned by ``seed``. ``longest`` scales the recording so that its longest response has that many
    tokens; 0 keeps the lengths.
    """

    def __init__(self, problems: int, samples: int, longest: int, seed: int) -> None:
        self._rollouts = _recorded()
        self._problems, self._samples, self._seed = problems, samples, seed
        self._scale = _scale(self._rollouts, longest)
        self._now = self.of(0)

    def of(self, rollout: int) -> list[list[int]]:
        """Tokens of each problem's samples in a rollout (from 0; the recording repeats)."""
        problems = self._rollouts[rollout % len(self._rollouts)]
        recorded = sorted(itertools.chain.from_iterable(problems), reverse=True)
        count = self._problems * self._samples
        chosen = [recorded[i * len(recorded) // count] for i in range(count)]
        random.Random(f"{self._seed}/{rollout}").shuffle(chosen)
        lengths = [max(1, round(self._scale * length)) for length in chosen]
        return [lengths[first : first + self._samples] for first in range(0, count, self._samples)]

    def begin(self, rollout: int) -> Sequence[Sequence[int]]:
        """Starts a rollout: the following requests belong to it."""
        self._now = self.of(rollout)
        return self._now

    def __call__(self, request: Request) -> Request:
        """Sets the length of a request named ``problem-sample`` to exactly its recorded length."""
        problem, sample = map(int, request.request_id.split("-"))
        return of_length(request, self._now[problem][sample])


class LengthsByProblem:
    """Gives a request a length that was recorded for a problem: one problem's lengths stay together.

    A training problem has the lengths of one recorded problem, and each of its responses in each rollout one of these.
    So a problem that is generated again has other lengths of the same kind. ``longest`` and ``seed`` are as above;
    ``law`` is one of ``LAWS``.
    """

    def __init__(self, longest: int, seed: int, law: str = RECORDED) -> None:
        self._problems = lengths_of_problems(longest, law)
        self._seed, self._rollout = seed, 0

    def begin(self, rollout: int) -> None:
        """Starts a rollout: the following requests belong to it."""
        self._rollout = rollout

    def __call__(self, request: Request) -> Request:
        """Sets the request's length, which depends on its problem, sample and rollout."""
        problem = random.Random(f"{self._seed}/{request.problem_key}").choice(self._problems)
        draw = random.Random(f"{self._seed}/{request.problem_key}/{request.sample}/{self._rollout}")
        return of_length(request, draw.choice(problem))


def lengths_of_problems(longest: int, law: str = RECORDED) -> list[list[int]]:
    """The lengths of each problem's responses; ``longest`` and ``law`` as above."""
    rollouts = [_of_long_responses()] if law == "32k" else _recorded(law)
    scale = _scale(rollouts, longest)
    return [[max(1, round(scale * length)) for length in one] for one in itertools.chain.from_iterable(rollouts)]


def _of_long_responses() -> list[list[int]]:
    """Of 512 problems with 8 responses each, up to 32,768 tokens, by the law that was fitted to TLT's 7B runs."""
    constants = shipped()
    normal = draw(np.random.default_rng(0), 512, 8, constants.group_correlation)
    tokens = LongTail(constants.length_median, constants.length_sigma).at(normal, 32768.0)
    return [[int(length) for length in row] for row in tokens]


def _recorded(name: str = RECORDED) -> list[list[list[int]]]:
    """Tokens by rollout, problem and sample."""
    file = resources.files("megatron_tlt.bench").joinpath("lengths", f"{name}.json")
    found: list[list[list[int]]] = json.loads(file.read_text("utf-8"))["rollouts"]
    return found


def _scale(rollouts: list[list[list[int]]], longest: int) -> float:
    return longest / max(max(map(max, rollout)) for rollout in rollouts) if longest else 1.0
