"""The final-answer marker that worked solutions write and verifiers read; GSM8K's."""

from __future__ import annotations

ANSWER_MARKER = "####"


def worked_solution(lines: list[str], answer: str) -> str:
    """The steps, one a line, then the marked answer as the last line (no newline after it)."""
    return "\n".join([*lines, f"{ANSWER_MARKER} {answer}"])
