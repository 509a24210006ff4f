"""Sorting whole numbers.

The solution of ``sort up 7 3 9`` repeatedly picks the smallest (``down``: the largest) of the remaining numbers:
``3|7 9``, ``7|9``, ``9|``, ``#### 3 7 9``. Its length grows with the square of their count.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megatron_tlt.tasks.generator import Generator, GeneratorParams, Worked
from megatron_tlt.tasks.marker import worked_solution
from megatron_tlt.tasks.sizes import Sizes


class NumberSortingParams(GeneratorParams):
    """The size is the count of numbers, which are between 0 and ``max_value``."""

    sizes: Sizes = Sizes(min=2, max=12, tail=1.6)
    max_value: Annotated[int, Field(ge=1, le=999_999)] = 99


class NumberSorting(Generator):
    dataset = "number_sorting"
    params_type = NumberSortingParams
    answer_format = "list"
    # The library accepts numbers that are off by one, a tolerance for decimals; these are integers.
    exact = True

    def library_config(self, size: int) -> dict[str, Any]:
        assert isinstance(self.params, NumberSortingParams)
        return {
            "min_numbers": size,
            "max_numbers": size,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": 0.0,
            "max_value": float(self.params.max_value),
        }

    def write(self, entry: dict[str, Any]) -> Worked:
        left = [int(float(number)) for number in entry["metadata"]["original_numbers"]]
        up = entry["metadata"]["direction"] == "ascending"
        prompt = f"sort {'up' if up else 'down'} {_spaced(left)}\n"
        picked: list[int] = []
        lines = []
        while left:
            picked.append(min(left) if up else max(left))
            left.remove(picked[-1])
            lines.append(f"{picked[-1]}|{_spaced(left)}")
        return Worked(prompt, _spaced(picked), worked_solution(lines, _spaced(picked)))


def _spaced(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
