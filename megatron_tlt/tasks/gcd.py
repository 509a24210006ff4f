"""The greatest common divisor of two numbers, by Euclid's repeated subtraction.

The solution of ``gcd 48 18`` is ``30 18``, ``12 18``, ``12 6``, ``6 6``, ``#### 6``; it ends when the two numbers are
equal or one of them is 1. Its length depends on the numbers' values and is not apparent from the prompt.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from megatron_tlt.tasks.generator import Generator, GeneratorParams, Worked
from megatron_tlt.tasks.marker import worked_solution
from megatron_tlt.tasks.sizes import Sizes


class GcdParams(GeneratorParams):
    """The size is the maximum of the two numbers."""

    sizes: Sizes = Sizes(min=9, max=99, tail=1.0)

    @model_validator(mode="after")
    def _two_numbers(self) -> GcdParams:
        if self.sizes.min < 2:
            raise ValueError(f"sizes.min is {self.sizes.min}; the largest number must be at least 2")
        return self


class Gcd(Generator):
    dataset = "gcd"
    params_type = GcdParams

    def library_config(self, size: int) -> dict[str, Any]:
        return {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": size}

    def write(self, entry: dict[str, Any]) -> Worked:
        a, b = entry["metadata"]["numbers"]
        prompt = f"gcd {a} {b}\n"
        lines = []
        while a != b and min(a, b) > 1:
            a, b = (a - b, b) if a > b else (a, b - a)
            lines.append(f"{a} {b}")
        return Worked(prompt, entry["answer"], worked_solution(lines, entry["answer"]))
