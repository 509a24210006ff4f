"""Base of the procedural tasks: cells of axes, canonical form and structure, two wordings, exact answers."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.generator import DrawnProblem, Worked
from megatron_tlt.tasks.marker import worked_solution
from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.tasks.sizes import Params

_MAX_ATTEMPTS = 500

Cell = Mapping[str, Any]
"""A value for each axis."""


class ProceduralParams(Params):
    """Parameters of every family.

    ``wording``: ``compact`` is a line for small models, with a marked answer; ``natural`` is English and takes the
    task's ``answer_format``. ``reward``: ``binary``, or ``shaped`` from -0.4 to 1.1 (``rewards/procedural.py``).
    """

    wording: Literal["compact", "natural"] = "compact"
    reward: Literal["binary", "shaped"] = "binary"


@dataclass(frozen=True)
class Instance:
    """A problem in both wordings.

    Attributes:
        compact: the prompt for small models, one line.
        natural: the prompt in English, without an instruction about the answer's place.
        answer: the reference answer; others may be correct too.
        steps: lines of the worked solution, without the answer.
        canonical: equal for problems that differ in wording or in the names of things alone.
        structure: the canonical form without its numbers: kinds of steps and their order.
        check: what the verifier needs beside the answer, of JSON types.
    """

    compact: str
    natural: str
    answer: str
    steps: list[str]
    canonical: str
    structure: str
    check: dict[str, Any] = field(default_factory=dict)


class ProblemFamily(ABC):
    """A family of problems; ``draw`` is a pure function of its arguments.

    Args:
        params: of ``params_type``.
        key: the task's key in the launch config, for errors.

    Raises:
        ConfigError: a cell has no problem in which every step changes something.
    """

    name: ClassVar[str]
    params_type: ClassVar[type[ProceduralParams]]

    def __init__(self, params: ProceduralParams, key: str = "tasks[0]") -> None:
        self._wording, self._reward, self._key = params.wording, params.reward, key
        self.cells: Sequence[Cell] = self.axes(params)
        if not self.cells:
            raise ConfigError(f"{key}.params: no combination of the axes exists; allowed: wider ones")
        for number in range(len(self.cells)):
            self.draw(0, number)

    @abstractmethod
    def axes(self, params: Any) -> list[Cell]:
        """All combinations of the axes that can exist; also keeps ``params`` for :meth:`build`."""

    @abstractmethod
    def build(self, rng: random.Random, cell: Cell) -> Instance | None:
        """A problem of a cell; None if this draw has a step that changes nothing, or no answer."""

    @staticmethod
    @abstractmethod
    def closeness(answer: str, check: Mapping[str, Any], given: str) -> float | None:
        """How near ``given`` is to a correct answer, from 0 to 1; 1 only for a correct one.

        None: ``given`` is not of the type that was asked for.
        """

    def draw(self, key: int, cell: int | None = None) -> DrawnProblem:
        """The problem of ``key``, any non-negative integer, of cell number ``cell`` (default: as the key says)."""
        rng = random.Random(stable_int("procedural", key))
        where = rng.randrange(len(self.cells))
        where = where if cell is None else cell % len(self.cells)
        for _ in range(_MAX_ATTEMPTS):
            found = self.build(rng, self.cells[where])
            if found is not None:
                return self._drawn(found, self.cells[where])
        raise ConfigError(
            f"{self._key}.params: none of {_MAX_ATTEMPTS} draws of {dict(self.cells[where])} is a problem in which "
            "every step changes something; allowed: wider params, or without this combination"
        )

    def probe(self, count: int) -> list[DrawnProblem]:
        """Draws over all cells, from either split."""
        return [self.draw(stable_int("probe", i), i * len(self.cells) // count) for i in range(count)]

    @property
    def probed(self) -> str:
        """Description of the probed draws for error messages."""
        return f"name: '{self.name}'"

    def _drawn(self, found: Instance, cell: Cell) -> DrawnProblem:
        prompt = f"{found.compact}\n" if self._wording == "compact" else found.natural
        return DrawnProblem(
            Worked(prompt, found.answer, worked_solution(found.steps, found.answer)),
            {
                "family": self.name,
                "reward": self._reward,
                "cell": dict(cell),
                "canonical": found.canonical,
                "check": json.loads(json.dumps(found.check)),
            },
            identity=found.canonical,
            structure=found.structure,
        )
