"""Base of the generated tasks: reasoning-gym makes the entry and judges the answer; we word it and work it out."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.tasks.sizes import Params, Sizes

#: How an answer as we word it becomes the one the library's verifier reads: ``list`` turns "1 2" into "['1', '2']".
AnswerFormat = Literal["plain", "list"]


class GeneratorParams(Params):
    """What every generator takes; a subclass gives ``sizes`` a default and says what a size is."""

    sizes: Sizes


@dataclass(frozen=True)
class Worked:
    """One entry's wording. ``solution`` ends in the marked ``answer``; None where there is no worked solution."""

    prompt: str
    answer: str
    solution: str | None


@dataclass(frozen=True)
class DrawnProblem:
    """A drawn problem: our words and what ``rewards``' reasoning_gym verifier needs."""

    worked: Worked
    metadata: dict[str, Any]


class Generator(ABC):
    """A task of controllable difficulty; ``draw`` is a pure function of its key."""

    dataset: ClassVar[str]
    params_type: ClassVar[type[GeneratorParams]]
    answer_format: ClassVar[AnswerFormat] = "plain"
    #: Also demand the very answer we would write, where the library's verifier is tolerant.
    exact: ClassVar[bool] = False

    def __init__(self, params: GeneratorParams) -> None:
        self.params = params
        self._datasets: dict[int, Any] = {}

    @abstractmethod
    def library_config(self, size: int) -> dict[str, Any]:
        """The library's config for problems of ``size``, without ``seed`` and ``size``."""

    @abstractmethod
    def write(self, entry: dict[str, Any]) -> Worked:
        """Words the library's ``entry`` compactly and works it out step by step."""

    def draw(self, key: int, size: int | None = None) -> DrawnProblem:
        """The problem of ``key`` (any non-negative integer), of the size that ``key`` draws or of ``size``."""
        if size is None:
            size = self.params.sizes.sample(random.Random(stable_int("size", key)))
        # The library seeds an entry with seed + index: a hashed index is a hashed seed.
        entry = self._dataset(size)[stable_int("entry", key)]
        return DrawnProblem(self.write(entry), self._metadata(entry))

    def probe(self, count: int) -> list[DrawnProblem]:
        """Draws of the largest size, of either split: their prompts are about the longest that the task has."""
        return [self.draw(stable_int("largest", i), self.params.sizes.max) for i in range(count)]

    @property
    def probed(self) -> str:
        """What was probed, as an error names it."""
        return f"params.sizes.max: found {self.params.sizes.max}"

    def _dataset(self, size: int) -> Any:
        if size not in self._datasets:
            import reasoning_gym  # slow to import (seconds), and most commands need none of it

            self._datasets[size] = reasoning_gym.create_dataset(
                self.dataset, seed=0, size=1 << 62, **self.library_config(size)
            )
        return self._datasets[size]

    def _metadata(self, entry: dict[str, Any]) -> dict[str, Any]:
        inner = {key: value for key, value in entry["metadata"].items() if key != "difficulty"}
        kept = {"question": entry["question"], "answer": entry["answer"], "metadata": inner}
        return {
            "dataset": self.dataset,
            # Through JSON, so that what a verifier's process reads is what stands here (tuples become lists).
            "entry": json.loads(json.dumps(kept)),
            "answer_format": self.answer_format,
            "exact": self.exact,
        }
