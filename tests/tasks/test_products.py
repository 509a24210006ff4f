"""Products for the calculator environment."""

from __future__ import annotations

import random

import pytest

from megatron_tlt.environments.calculator import Calculator
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.products import products


def test_the_solution_is_what_the_calculator_answers() -> None:
    for seed in range(50):
        problem = products(random.Random(seed), min_digits=1, max_digits=3)
        call, value, last = problem["solution"].splitlines()
        assert Calculator().step(call).text == value == problem["answer"]
        assert last == f"#### {value}" and problem["prompt"] == f"product {call[6:-7]}\n"
    lengths = {len(factor) for factor in problem["prompt"].split()[1].split("*")}
    assert lengths <= {1, 2, 3}


def test_digits_out_of_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="found digits 3 to 2; allowed: 1 <= min_digits <= max_digits"):
        products(random.Random(1), min_digits=3, max_digits=2)
