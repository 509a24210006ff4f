"""Spelling a word backward.

The solution of ``reverse sun`` moves the last letter over, one per line: ``su|n``, ``s|nu``, ``#### nus``. Its length
grows with the square of the word's. Words are in lower case; the library's verifier ignores case.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from megatron_tlt.tasks.generator import Generator, GeneratorParams, Worked
from megatron_tlt.tasks.marker import worked_solution
from megatron_tlt.tasks.sizes import Sizes


class SpellBackwardParams(GeneratorParams):
    """The size is the number of letters; the words in the library's list have 3 to 10."""

    sizes: Sizes = Sizes(min=3, max=10, tail=2.0)

    @model_validator(mode="after")
    def _words_exist(self) -> SpellBackwardParams:
        if self.sizes.min < 3 or self.sizes.max > 10:
            raise ValueError(f"sizes are {self.sizes.min} to {self.sizes.max}; the word list has 3 to 10 letters")
        return self


class SpellBackward(Generator):
    dataset = "spell_backward"
    params_type = SpellBackwardParams

    def library_config(self, size: int) -> dict[str, Any]:
        return {"min_word_len": size, "max_word_len": size}

    def write(self, entry: dict[str, Any]) -> Worked:
        word = entry["metadata"]["word"].lower()
        answer = entry["answer"].lower()
        lines = [f"{word[: len(word) - i]}|{answer[:i]}" for i in range(1, len(word))]
        return Worked(f"reverse {word}\n", answer, worked_solution(lines, answer))
