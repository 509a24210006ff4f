"""Sums and differences, left to right.

The solution of ``sum 3+5-2`` rewrites the remaining expression after each operation: ``8-2``, ``6``, ``#### 6``. Its
length grows with the square of the number of terms.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megatron_tlt.tasks.generator import Generator, GeneratorParams, Worked
from megatron_tlt.tasks.marker import worked_solution
from megatron_tlt.tasks.sizes import Sizes


class ChainSumParams(GeneratorParams):
    """The size is the number of terms; all terms of a problem have the same number of digits."""

    sizes: Sizes = Sizes(min=2, max=14, tail=1.6)
    max_digits: Annotated[int, Field(ge=1, le=9)] = 1


class ChainSum(Generator):
    dataset = "chain_sum"
    params_type = ChainSumParams

    def library_config(self, size: int) -> dict[str, Any]:
        assert isinstance(self.params, ChainSumParams)
        return {"min_terms": size, "max_terms": size, "min_digits": 1, "max_digits": self.params.max_digits}

    def write(self, entry: dict[str, Any]) -> Worked:
        terms = entry["metadata"]["expression"].split(" ")
        total, rest = int(terms[0]), terms[1:]
        lines = []
        while rest:
            total += int(rest[1]) if rest[0] == "+" else -int(rest[1])
            rest = rest[2:]
            lines.append(f"{total}{''.join(rest)}")
        return Worked(f"sum {''.join(terms)}\n", entry["answer"], worked_solution(lines, entry["answer"]))
