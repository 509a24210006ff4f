"""A calculator: evaluates the arithmetic between two tags of a turn."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from megatron_tlt.environments.interface import Observation

if TYPE_CHECKING:
    from megatron_tlt.tasks.types import Problem

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200
"""Characters of an expression; it bounds the digits of a result too."""


class Calculator:
    """Answers ``<calc>12 * 7</calc>`` with ``84``; a turn without a call ends the episode, for the verifier to judge.

    The last call of a turn counts. What cannot be evaluated is answered with the reason.

    Args:
        begin, end: the tags.
    """

    def __init__(self, begin: str = "<calc>", end: str = "</calc>") -> None:
        self._begin, self._end = begin, end

    def reset(self, problem: Problem, seed: int) -> None:
        """See ``Environment.reset``."""

    def step(self, turn: str) -> Observation:
        """See ``Environment.step``."""
        _, begin, rest = turn.rpartition(self._begin)
        expression, end, _ = rest.partition(self._end)
        if not begin or not end:
            return Observation(None)
        return Observation(calculate(expression))


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses; exact, or the reason why there is none.

    A value that is no integer is a fraction in lowest terms, such as ``7/3``.
    """
    if len(expression) > _LONGEST:
        return f"error: {len(expression)} characters; allowed: {_LONGEST}"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "error: allowed are numbers, + - * / and parentheses"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(ast.dump(node))
