"""GSM8K's final-answer marker, which worked solutions contain and verifiers read."""

from __future__ import annotations

ANSWER_MARKER = "####"
_FORMS = {"answer_tag": "<answer>%s</answer>", "boxed": "\\boxed{%s}", "last_line": "%s"}
"""Form of the last line by a task's ``answer_format``."""


def worked_solution(lines: list[str], answer: str) -> str:
    """The steps, one per line, then the marked answer as the last line (without a trailing newline)."""
    return "\n".join([*lines, f"{ANSWER_MARKER} {answer}"])


def in_format(solution: str, answer_format: str | None) -> str:
    """A worked solution with its answer in the form of ``answer_format``; unchanged if that is None."""
    if answer_format is None:
        return solution
    steps, _, answer = solution.rpartition(ANSWER_MARKER)
    return steps + _FORMS[answer_format] % answer.strip()
