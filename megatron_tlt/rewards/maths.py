"""Rule-based verification of mathematical answers by math-verify."""

from __future__ import annotations

import logging
import re

from megatron_tlt.rewards.answers import parsed, parsed_answer, same_answer, same_value
from megatron_tlt.rewards.extract import final_answer, formatted_answer
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem
from megatron_tlt.tasks.wording import ANSWER_IN

_TAIL_CHARACTERS = 500  # without a marker or a box, only the end is searched for an answer
_HEADING = re.compile(r"^\s*#+\s.*$", re.MULTILINE)
_NUMBER = r"-?\d[\d.]*"
_LIST_AT_END = re.compile(
    rf"(?<![\w.,])({_NUMBER}(?:(?:\s*,\s*(?:and\s+|or\s+)?|\s+(?:and|or)\s+){_NUMBER})+)\W*$", re.ASCII
)


def load() -> None:
    """Imports the library and parses once (takes seconds), so that the first verification is as fast as the others."""
    _quiet()
    parsed(r"\frac{1}{2}")


def _quiet() -> None:
    # It warns that its own timeouts are off. They use SIGALRM in Python, which has no effect during a C call and is
    # refused outside the main thread. The pool's time limit, which ends the process, replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify(problem: Problem, response: str) -> Reward:
    """1 if the final answer equals ``problem.answer`` mathematically (see ``same_answer``), else 0.

    The answer is taken from the place that the task's ``answer_format`` defines. Without a format it is the one that
    ``final_answer`` finds, else the last expression near the end. There is no time limit: run it in a RewardPool.
    """
    _quiet()
    if ANSWER_IN in problem.metadata:
        found = formatted_answer(response, problem.metadata[ANSWER_IN])
        if found is None:
            return Reward(0.0, False)
    else:
        found = final_answer(response)
    if found is None:
        return _verify_unmarked(problem.answer, response[-_TAIL_CHARACTERS:])
    correct = same_answer(problem.answer, found)
    return Reward(float(correct), correct, found or None)


def _verify_unmarked(answer: str, end: str) -> Reward:
    from math_verify import parse

    end = _HEADING.sub("", end).rstrip()
    if listed := _LIST_AT_END.search(end):  # math-verify would take only the last of "1, 2"
        correct = same_answer(answer, listed[1])
        return Reward(float(correct), correct, listed[1])
    given = list(parse(end, parsing_timeout=None))
    if not given:
        return Reward(0.0, False)
    correct = same_value(parsed_answer(answer), given)
    return Reward(float(correct), correct, str(given[-1]))
