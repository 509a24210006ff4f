"""The final-answer marker that worked solutions write and verifiers read; GSM8K's."""

from __future__ import annotations

ANSWER_MARKER = "####"
_FORMS = {"answer_tag": "<answer>%s</answer>", "boxed": "\\boxed{%s}", "last_line": "%s"}
"""How the last line reads under a task's ``answer_format``."""


def worked_solution(lines: list[str], answer: str) -> str:
    """The steps, one a line, then the marked answer as the last line (no newline after it)."""
    return "\n".join([*lines, f"{ANSWER_MARKER} {answer}"])


def in_format(solution: str, answer_format: str | None) -> str:
    """A worked solution with its answer where ``answer_format`` asks for it; as it is where that is None."""
    if answer_format is None:
        return solution
    steps, _, answer = solution.rpartition(ANSWER_MARKER)
    return steps + _FORMS[answer_format] % answer.strip()
