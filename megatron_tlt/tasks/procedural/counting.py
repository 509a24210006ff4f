"""Counting in a pipeline: numbers pass filters and transforms, and an aggregate of what is left is asked for.

The solution of ``pipe 3 8 12|even|>9|sum`` has a line of the numbers after each step: ``8 12``, ``12``, then the
running sums, ``12``, and ``#### 12``. Every filter removes a number and leaves one; every transform changes one.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from megatron_tlt.tasks.procedural.family import Cell, Instance, ProblemFamily, ProceduralParams
from megatron_tlt.tasks.procedural.integers import integer_closeness
from megatron_tlt.tasks.sizes import Sizes

Aggregate = Literal["count", "sum", "max", "min", "distinct", "range"]
Operation = tuple[str, int]
"""Kind and its number; 0 for kinds without one."""

_LARGEST = 1_000_000
_TRIES = 30


class PipelineCountingParams(ProceduralParams):
    """Axes: how many ``filters`` and ``transforms`` (in any order), and the ``aggregates``.

    ``numbers``: how many numbers there are, from 0 to ``max_value``; at least one more than filters. ``source``: a list
    of numbers, or all of a range.
    """

    filters: Annotated[tuple[Annotated[int, Field(ge=1, le=4)], ...], Field(min_length=1)] = (1, 2, 3, 4)
    transforms: Annotated[tuple[Annotated[int, Field(ge=0, le=3)], ...], Field(min_length=1)] = (0, 1, 2, 3)
    aggregates: Annotated[tuple[Aggregate, ...], Field(min_length=1)] = get_args(Aggregate)
    numbers: Sizes = Sizes(min=5, max=12, tail=0.0)
    max_value: Annotated[int, Field(ge=9, le=9999)] = 99
    source: Literal["list", "range"] = "list"

    @model_validator(mode="after")
    def _so_many_exist(self) -> PipelineCountingParams:
        if self.numbers.max > self.max_value + 1:
            raise ValueError(
                f"numbers.max is {self.numbers.max}; from 0 to max_value there are {self.max_value + 1} numbers; "
                "allowed: at most that many, or a larger max_value"
            )
        return self


_FILTERS: dict[str, Callable[[int, int], bool]] = {
    "even": lambda x, _: x % 2 == 0,
    "odd": lambda x, _: x % 2 == 1,
    "/": lambda x, k: x % k == 0,
    ">": lambda x, k: x > k,
    "<": lambda x, k: x < k,
    "has": lambda x, k: str(k) in str(x),
    "not": lambda x, k: str(k) not in str(x),
    "mod3": lambda x, k: x % 3 == k,
}
_TRANSFORMS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, k: x + k,
    "*": lambda x, k: x * k,
    "%": lambda x, k: x % k,
    "rev": lambda x, _: int(str(x)[::-1]),
    "sq": lambda x, _: x * x,
    "dsum": lambda x, _: sum(map(int, str(x))),
}
_NUMBERS = {"/": (3, 7), "has": (0, 9), "not": (0, 9), "mod3": (0, 2), "+": (1, 20), "*": (2, 5), "%": (4, 15)}
"""Least and largest number of an operation."""
_WITHOUT_NUMBER = ("even", "odd", "rev", "sq", "dsum")
_SENTENCES = {
    "even": "Keep only the even numbers.",
    "odd": "Keep only the odd numbers.",
    "/": "Keep only the numbers that are divisible by {}.",
    ">": "Keep only the numbers that are greater than {}.",
    "<": "Keep only the numbers that are less than {}.",
    "has": "Keep only the numbers whose decimal digits include {}.",
    "not": "Keep only the numbers whose decimal digits do not include {}.",
    "mod3": "Keep only the numbers that leave a remainder of {} when divided by 3.",
    "+": "Add {} to each number.",
    "*": "Multiply each number by {}.",
    "%": "Replace each number by its remainder when divided by {}.",
    "rev": "Reverse the decimal digits of each number, dropping leading zeros.",
    "sq": "Square each number.",
    "dsum": "Replace each number by the sum of its decimal digits.",
}
_QUESTIONS = {
    "count": "How many numbers are left?",
    "sum": "What is the sum of the numbers that are left?",
    "max": "What is the largest number that is left?",
    "min": "What is the smallest number that is left?",
    "distinct": "How many different numbers are left?",
    "range": "What is the largest number that is left minus the smallest?",
}


def apply(operation: Operation, numbers: Sequence[int]) -> list[int]:
    """The numbers after one filter or transform, in order."""
    kind, k = operation
    if kind in _FILTERS:
        return [x for x in numbers if _FILTERS[kind](x, k)]
    return [_TRANSFORMS[kind](x, k) for x in numbers]


def aggregate(kind: str, numbers: Sequence[int]) -> int:
    """The answer of at least one number."""
    found: dict[str, int] = {
        "count": len(numbers),
        "sum": sum(numbers),
        "max": max(numbers),
        "min": min(numbers),
        "distinct": len(set(numbers)),
        "range": max(numbers) - min(numbers),
    }
    return found[kind]


class PipelineCounting(ProblemFamily):
    name = "pipeline_counting"
    params_type = PipelineCountingParams

    def axes(self, params: PipelineCountingParams) -> list[Cell]:
        self._params = params
        axes = itertools.product(sorted(set(params.filters)), sorted(set(params.transforms)), params.aggregates)
        return [{"filters": f, "transforms": t, "aggregate": a} for f, t, a in axes]

    def build(self, rng: random.Random, cell: Cell) -> Instance | None:
        params = self._params
        count = max(params.numbers.sample(rng), cell["filters"] + 1)
        numbers = self._numbers(rng, count)
        kinds = [_FILTERS] * cell["filters"] + [_TRANSFORMS] * cell["transforms"]
        rng.shuffle(kinds)
        operations: list[Operation] = []
        stages = [numbers]
        for position, table in enumerate(kinds):
            after = sum(1 for later in kinds[position + 1 :] if later is _FILTERS)
            found = self._operation(rng, table, stages[-1], after, operations)
            if found is None:
                return None
            operations.append(found)
            stages.append(apply(found, stages[-1]))
        answer = aggregate(cell["aggregate"], stages[-1])
        return Instance(
            compact="|".join(["pipe " + _spaced(numbers), *map(_compact, operations), cell["aggregate"]]),
            natural=self._natural(numbers, operations, cell["aggregate"]),
            answer=str(answer),
            steps=[*map(_spaced, stages[1:]), *_totals(cell["aggregate"], stages[-1])],
            canonical=json.dumps(["pipe", sorted(numbers), _in_normal_order(operations), cell["aggregate"]]),
            structure="|".join(["pipe", *(kind for kind, _ in _in_normal_order(operations)), cell["aggregate"]]),
        )

    def _numbers(self, rng: random.Random, count: int) -> list[int]:
        largest = self._params.max_value
        if self._params.source == "list":
            return rng.sample(range(largest + 1), min(count, largest + 1))
        first = rng.randint(0, max(0, largest - count + 1))
        return list(range(first, first + count))

    @staticmethod
    def _operation(
        rng: random.Random, table: Mapping[str, Any], numbers: list[int], filters_after: int, before: list[Operation]
    ) -> Operation | None:
        """An operation that changes the numbers and leaves enough of them for the filters that follow."""
        for _ in range(_TRIES):
            kind = rng.choice(list(table))
            operation = (kind, 0 if kind in _WITHOUT_NUMBER else _number_for(rng, kind, numbers))
            after = apply(operation, numbers)
            if after == numbers or len(after) < 1 + filters_after or max(after) > _LARGEST or operation in before:
                continue
            return operation
        return None

    def _natural(self, numbers: list[int], operations: list[Operation], asked: str) -> str:
        if self._params.source == "range":
            start = f"Start with all whole numbers from {numbers[0]} to {numbers[-1]}."
        else:
            start = f"Start with the numbers {', '.join(map(str, numbers))}."
        steps = " ".join(f"{i}. {_SENTENCES[kind].format(k)}" for i, (kind, k) in enumerate(operations, 1))
        return f"{start} Apply these steps in order. {steps} {_QUESTIONS[asked]}"

    @staticmethod
    def closeness(answer: str, check: Mapping[str, Any], given: str) -> float | None:
        return integer_closeness(int(answer), given)


def _number_for(rng: random.Random, kind: str, numbers: Sequence[int]) -> int:
    if kind in (">", "<"):
        return rng.choice(numbers) + rng.choice((-1, 0, 1))
    return rng.randint(*_NUMBERS[kind])


def _in_normal_order(operations: Sequence[Operation]) -> list[Operation]:
    """Filters that follow each other commute, so they are sorted."""
    ordered: list[Operation] = []
    for is_filter, run in itertools.groupby(operations, key=lambda operation: operation[0] in _FILTERS):
        commuting = list(run)
        ordered += sorted(commuting) if is_filter else commuting
    return ordered


def _compact(operation: Operation) -> str:
    kind, k = operation
    if kind in _WITHOUT_NUMBER:
        return kind
    return f"{kind} {k}" if kind.isalnum() else f"{kind}{k}"


def _totals(asked: str, numbers: Sequence[int]) -> list[str]:
    return [_spaced(list(itertools.accumulate(numbers)))] if asked == "sum" and len(numbers) > 1 else []


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
