"""Judges programs by tests: the last Python block of a response runs in a sandbox.

``Problem.answer`` is one of

- Python statements that fail if the program is wrong, such as ``assert add(1, 2) == 3`` (as in MBPP and HumanEval), or
- a JSON object with ``inputs`` and ``outputs``, lists of texts: what the program reads and must print (as in APPS and
  verl's code data). Lines are compared without the blanks at their ends.

The tests' statements run in the program's own interpreter. A program that ends early fails them; one that replaces what
they use (``builtins``, operators) can still deceive them.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import time
from typing import Any

from megatron_tlt.rewards.sandbox import SandboxLimits, run_sandboxed
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TOTAL_S = 8.0
"""Wall-clock seconds for all tests of a response, below the pool's default limit."""

_HARNESS = """
program, tests, word = {program!r}, {tests!r}, {word!r}
scope = {{"__name__": "__main__"}}
exec(compile(program, "program", "exec"), scope)
exec(compile(tests, "tests", "exec"), scope)
import sys
sys.__stdout__.write("\\n" + word + "\\n")
sys.__stdout__.flush()
"""


def verify(problem: Problem, response: str) -> Reward:
    """1 if the program passes all tests, else 0; ``extracted`` is the program."""
    blocks = _BLOCK.findall(response)
    if not blocks:
        return Reward(0.0, correct=False)
    program = blocks[-1]
    passed = _passes(program, problem.answer)
    return Reward(float(passed), correct=passed, extracted=program)


def _passes(program: str, answer: str) -> bool:
    pairs = _pairs(answer)
    if pairs is None:
        word = secrets.token_hex(16)
        result = run_sandboxed(_HARNESS.format(program=program, tests=answer, word=word))
        return result.succeeded and result.stdout.endswith(f"\n{word}\n")
    ends = time.monotonic() + _TOTAL_S
    for given, expected in pairs:
        left = ends - time.monotonic()
        if left <= 0:
            return False
        result = run_sandboxed(program, given, SandboxLimits(seconds=min(SandboxLimits.seconds, left)))
        if not result.succeeded or _lines(result.stdout) != _lines(expected):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _pairs(answer: str) -> list[tuple[str, str]] | None:
    """Inputs and outputs; None if the answer is statements."""
    try:
        found: Any = json.loads(answer)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    return list(zip(found["inputs"], found["outputs"], strict=True))


def tests_problem(answer: str) -> str | None:
    """Why a problem's answer is no test; None if it is one."""
    try:
        found: Any = json.loads(answer)
    except ValueError:
        found = None
    if isinstance(found, dict):
        given, expected = found.get("inputs"), found.get("outputs")
        if not (isinstance(given, list) and isinstance(expected, list) and len(given) == len(expected) > 0):
            return "its answer has no lists 'inputs' and 'outputs' of equal length"
        if not all(isinstance(text, str) for text in (*given, *expected)):
            return "its 'inputs' and 'outputs' are not all texts"
        return None
    try:
        statements = ast.parse(answer).body
    except (SyntaxError, ValueError) as error:
        return f"its answer is neither JSON nor Python: {error}"
    return None if statements else "its answer has no test"
