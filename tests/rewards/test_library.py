"""reasoning-gym's verifiers, held to the answer where they are tolerant."""

from __future__ import annotations

import pytest

from megatron_tlt.rewards.library import verify
from megatron_tlt.tasks.types import Problem


@pytest.mark.parametrize(
    ("answer", "given", "correct"),
    [
        ("12", "12", True),
        ("12", "+12.0", True),
        ("12", "1,2", False),
        ("12", "1_2", False),
        ("12", "12,", False),
        ("1234", "1,234", True),
        ("1234", "12,34", False),
        ("-1234567", "-1,234,567", True),
        ("1234567", "1,234567", False),
    ],
)
def test_commas_of_a_sum_separate_thousands(answer: str, given: str, correct: bool) -> None:
    metadata = {"dataset": "chain_sum", "entry": {"answer": answer, "metadata": {}}}
    assert verify(Problem("p", "s", "?", answer, "reasoning_gym", metadata), f"#### {given}").correct == correct
