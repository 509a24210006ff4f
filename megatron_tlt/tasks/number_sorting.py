"""Sorting whole numbers.

``sort up 7 3 9`` is worked out by repeated picks of the smallest (``down``: the largest) number from what is left:
``3|7 9``, ``7|9``, ``9|``, ``#### 3 7 9``. The length grows with the square of how many there are.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megatron_tlt.tasks.generator import Generator, GeneratorParams, Worked
from megatron_tlt.tasks.marker import worked_solution
from megatron_tlt.tasks.sizes import Sizes


class NumberSortingParams(GeneratorParams):
    """A size is how many numbers there are; they lie between 0 and ``max_value``."""

    sizes: Sizes = Sizes(min=2, max=12, tail=1.6)
    max_value: Annotated[int, Field(ge=1, le=999_999)] = 99


class NumberSorting(Generator):
    dataset = "number_sorting"
    params_type = NumberSortingParams
    answer_format = "list"
    # The library accepts numbers that are off by one, meant for decimals; ours are whole.
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
