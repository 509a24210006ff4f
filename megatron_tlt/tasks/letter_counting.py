"""Counting a letter in a text.

The solution of ``count e: the tree`` lists every letter with the running count: ``t0h0e1 t1r1e2e3``, ``#### 3``. Its
length is proportional to the text's. Texts are in lower case; the library's count ignores case.
"""

from __future__ import annotations

from typing import Any

from megatron_tlt.tasks.generator import Generator, GeneratorParams, Worked
from megatron_tlt.tasks.marker import worked_solution
from megatron_tlt.tasks.sizes import Sizes


class LetterCountingParams(GeneratorParams):
    """The size is the number of consecutive words from the library's text."""

    sizes: Sizes = Sizes(min=1, max=16, tail=1.8)


class LetterCounting(Generator):
    dataset = "letter_counting"
    params_type = LetterCountingParams

    def library_config(self, size: int) -> dict[str, Any]:
        return {"min_words": size, "max_words": size}

    def write(self, entry: dict[str, Any]) -> Worked:
        words = [word.lower() for word in entry["metadata"]["span"]]
        letter, count = entry["metadata"]["target_letter"], 0
        counted = []
        for word in words:
            pieces = []
            for character in word:
                count += character == letter
                pieces.append(f"{character}{count}")
            counted.append("".join(pieces))
        prompt = f"count {letter}: {' '.join(words)}\n"
        return Worked(prompt, entry["answer"], worked_solution([" ".join(counted)], entry["answer"]))
