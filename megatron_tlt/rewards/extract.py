"""Finds the final answer in a response."""

from __future__ import annotations

from megatron_tlt.tasks.marker import ANSWER_MARKER

_BOXED = "\\boxed{"


def marked_answer(response: str) -> str | None:
    """What follows the last ``####`` on its line; None without a marker or with nothing after it."""
    _, marker, tail = response.rpartition(ANSWER_MARKER)
    answer = tail.split("\n", 1)[0].strip()
    return answer if marker and answer else None


def boxed_answer(response: str) -> str | None:
    """The inside of the last ``\\boxed{...}`` with balanced braces; None without one."""
    _, marker, tail = response.rpartition(_BOXED)
    if not marker:
        return None
    depth = 1
    for position, character in enumerate(tail):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return tail[:position].strip() or None
    return None
