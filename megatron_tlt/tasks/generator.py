"""Base of the generated tasks: reasoning-gym creates and scores an entry; prompt and solution are written here."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.tasks.sizes import Params, Sizes

#: Conversion of an answer to the form that the library's verifier reads: ``list`` turns "1 2" into "['1', '2']".
AnswerFormat = Literal["plain", "list"]


class GeneratorParams(Params):
    """Parameters of every generator; a subclass sets the default of ``sizes`` and defines the meaning of a size."""

    sizes: Sizes


@dataclass(frozen=True)
class Worked:
    """Prompt, answer and solution of an entry. ``solution`` ends in the marked ``answer``; None if there is none."""

    prompt: str
    answer: str
    solution: str | None


@dataclass(frozen=True)
class DrawnProblem:
    """A drawn problem: its text, and the metadata for its verifier.

    ``identity`` is equal for problems that are the same in other words; None: the prompt. ``structure`` is what two
    problems share that differ in their numbers alone; None where a task has none.
    """

    worked: Worked
    metadata: dict[str, Any]
    identity: str | None = None
    structure: str | None = None

    def split_by(self, held_out: str) -> str:
        """The text that decides whether the problem is held out; ``held_out`` is that of the task."""
        if held_out == "structure":
            assert self.structure is not None  # refused for other tasks when the config is read
            return self.structure
        return self.worked.prompt if self.identity is None else self.identity


class Generator(ABC):
    """A task with adjustable difficulty; ``draw`` is a pure function of its key."""

    dataset: ClassVar[str]
    params_type: ClassVar[type[GeneratorParams]]
    answer_format: ClassVar[AnswerFormat] = "plain"
    #: Require the exact reference answer, because the library's verifier is too tolerant.
    exact: ClassVar[bool] = False

    def __init__(self, params: GeneratorParams) -> None:
        self.params = params
        self._datasets: dict[int, Any] = {}

    @abstractmethod
    def library_config(self, size: int) -> dict[str, Any]:
        """The library's config for problems of ``size``, without ``seed`` and ``size``."""

    @abstractmethod
    def write(self, entry: dict[str, Any]) -> Worked:
        """Writes the library's ``entry`` as a compact prompt with a step-by-step solution."""

    def draw(self, key: int, size: int | None = None) -> DrawnProblem:
        """The problem of ``key`` (any non-negative integer); ``key`` also determines the size unless it is given."""
        if size is None:
            size = self.params.sizes.sample(random.Random(stable_int("size", key)))
        # The library seeds an entry with seed + index, so hashing the index hashes the seed.
        entry = self._dataset(size)[stable_int("entry", key)]
        return DrawnProblem(self.write(entry), self._metadata(entry))

    def probe(self, count: int) -> list[DrawnProblem]:
        """Draws of the largest size, from either split; their prompts are about the longest of the task."""
        return [self.draw(stable_int("largest", i), self.params.sizes.max) for i in range(count)]

    @property
    def probed(self) -> str:
        """Description of the probed draws for error messages."""
        return f"params.sizes.max: found {self.params.sizes.max}"

    def _dataset(self, size: int) -> Any:
        if size not in self._datasets:
            import reasoning_gym  # slow to import (seconds), and most commands do not need it

            self._datasets[size] = reasoning_gym.create_dataset(
                self.dataset, seed=0, size=1 << 62, **self.library_config(size)
            )
        return self._datasets[size]

    def _metadata(self, entry: dict[str, Any]) -> dict[str, Any]:
        inner = {key: value for key, value in entry["metadata"].items() if key != "difficulty"}
        kept = {"question": entry["question"], "answer": entry["answer"], "metadata": inner}
        return {
            "dataset": self.dataset,
            # Converted through JSON, so that it equals the data in the verifier's process (tuples become lists).
            "entry": json.loads(json.dumps(kept)),
            "answer_format": self.answer_format,
            "exact": self.exact,
        }
