"""The verdicts of ``verifier: math`` over a table of answers, beside what math-verify alone and verl's rules say.

``pytest tests/rewards/test_math_table.py -k counts -s`` prints the comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from megatron_tlt.rewards.maths import verify
from megatron_tlt.tasks.types import Problem
from tests.rewards.math_cases import CASES
from tests.rewards.other_rules import math_verify_alone, verl_gsm8k, verl_math

ROWS = [row for rows in CASES.values() for row in rows]


def ours(answer: str, response: str) -> bool:
    reward = verify(Problem("p", "s", "?", answer, "math"), response)
    assert reward.error is None and reward.value == float(reward.correct)
    return reward.correct


RULES: dict[str, Callable[[str, str], bool]] = {
    "verifier: math": ours,
    "math-verify alone": math_verify_alone,
    "verl's gsm8k rule": verl_gsm8k,
    "verl's math rule": verl_math,
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off


@pytest.mark.parametrize(("answer", "response", "verdicts"), ROWS)
def test_verdicts(answer: str, response: str, verdicts: str) -> None:
    found = "".join("+" if rule(answer, response) else "-" for rule in RULES.values())
    assert found == verdicts, f"{list(RULES)}: {found}, the table says {verdicts}"


def test_counts() -> None:
    right = [verdicts[0] == "+" for _, _, verdicts in ROWS]
    assert len(ROWS) >= 150 and 0.4 <= right.count(False) / len(ROWS) <= 0.6
    assert len({row[:2] for row in ROWS}) == len(ROWS)
    print(f"\n{len(ROWS)} cases, {right.count(False)} of them wrong answers\n{'':20} false accepts  false rejects")
    counts = []
    for name, rule in RULES.items():
        said = [rule(answer, response) for answer, response, _ in ROWS]
        accepts = sum(s and not r for s, r in zip(said, right, strict=True))
        rejects = sum(r and not s for s, r in zip(said, right, strict=True))
        counts.append((accepts, rejects))
        print(f"{name:20} {accepts:13}  {rejects:13}")
    assert counts == [(0, 0), (36, 30), (4, 100), (13, 86)]
