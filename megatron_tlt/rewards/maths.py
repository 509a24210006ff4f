"""Rule-based verification of mathematical answers by math-verify."""

from __future__ import annotations

import logging
from typing import Any

from megatron_tlt.rewards.extract import boxed_answer, marked_answer
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem

_TAIL_CHARACTERS = 500  # without a marker or a box, an answer is looked for at the end only


def load() -> None:
    """Imports the library and parses once (seconds), so that the first verification is as quick as the rest."""
    _quiet()
    _expressions(r"\frac{1}{2}")


def _quiet() -> None:
    # It warns that its own timeouts are off. They are SIGALRM in Python: useless while a C call runs and refused
    # outside the main thread. The pool's time limit, which ends the process, stands in their place.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify(problem: Problem, response: str) -> Reward:
    """1 when the final answer equals ``problem.answer`` mathematically, else 0.

    The answer is what follows ``####``, else the last ``\\boxed{}``, else the last expression near the end. Takes as
    long as it takes: run it in a RewardPool.
    """
    _quiet()
    from math_verify import parse
    from math_verify import verify as equal

    extracted = marked_answer(response) or boxed_answer(response)
    if extracted is not None:
        if _plain(extracted) == _plain(problem.answer):
            return Reward(1.0, True, extracted)
        given = _expressions(extracted)
    else:
        given = list(parse(response[-_TAIL_CHARACTERS:], parsing_timeout=None))
        if not given:
            return Reward(0.0, False)
        extracted = str(given[-1])
    wanted = _expressions(problem.answer)
    correct = bool(given and wanted) and bool(equal(wanted, given, timeout_seconds=None))
    return Reward(float(correct), correct, extracted)


def _expressions(answer: str) -> list[Any]:
    """What a text that is nothing but an answer says; empty when that is no mathematics.

    Read as a whole first: looking for expressions *in* it would find only the 1 of x^2+2x+1.
    """
    from math_verify import parse

    whole = [] if "$" in answer else parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return list(whole or parse(answer, parsing_timeout=None))


def _plain(text: str) -> str:
    return text.replace(",", "").replace("$", "").replace(" ", "").rstrip(".")
