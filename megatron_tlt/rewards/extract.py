"""Finds the final answer in a response."""

from __future__ import annotations

import re

from megatron_tlt.tasks.marker import ANSWER_MARKER

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
#: Separators between the boxes of one list: commas, spaces, ends of formulas, "and", "or".
_LISTED = re.compile(r"(?:[ \t,$~]|\\[,;:! ()]|\\q?quad\b|\\(?:text|mbox)\{[ ,]*(?:and|or)[ ,]*\}|\b(?:and|or)\b)*")
_MARKED_LINE = re.compile(rf"{ANSWER_MARKER}+[ \t]*([^\n]*)")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
#: "18 dollars", "5.5 square metres", but not headings such as "2 Solve for x" or "1. Compute" (capital or dot).
_NUMBER_WITH_UNIT = re.compile(r"[^\w\s]*-?\d[\d.,]*(?:\s+[a-z]+){1,2}\W*")
#: "Answer: ", "**The final answer is** " and "\text{Answer is }" before an answer.
LABEL = re.compile(
    r"^\W*(?:text\{\s*)?(?:the\s+)?(?:final\s+)?answer(?:\s+is|\s*[:=])+\s*(?:\}|\*\*)?\s*", re.IGNORECASE
)


def marked_answer(response: str) -> str | None:
    """The text after the last ``####`` on its line; None if there is no marker or no text after it."""
    _, marker, tail = response.rpartition(ANSWER_MARKER)
    answer = tail.split("\n", 1)[0].strip()
    return answer if marker and answer else None


def formatted_answer(response: str, answer_format: str) -> str | None:
    """The answer in the place that a task's ``answer_format`` defines; None if there is none.

    ``answer_tag``: in the last closed ``<answer>`` tag. ``boxed``: in the last box and the boxes joined to it.
    ``last_line``: the last line with text, without a label such as "Answer:".
    """
    if answer_format == "answer_tag":
        tags = _ANSWER_TAG.findall(response)
        return tags[-1].strip() or None if tags else None
    if answer_format == "boxed":
        boxes = list(_BOX.finditer(response))
        return _boxed_answer(response, boxes) or None if boxes else None
    if answer_format == "last_line":
        line = response.strip().rpartition("\n")[2]
        return LABEL.sub("", line).strip(" *") or None
    raise ValueError(f"answer format {answer_format!r}; allowed are answer_tag, boxed, last_line")


def final_answer(response: str) -> str | None:
    """The marked answer of a mathematical response: the later of its last box and its last ``####`` answer line.

    Boxes on one line separated only by commas, "and" or "or" form one list. A ``####`` line is an answer if it contains
    only an answer; a Markdown heading contains words. A line of words is an answer only if the response ends with it
    and has no box.

    Returns:
        None if nothing is marked; an empty text if the last box is empty or not closed.
    """
    marked, marked_at = None, -1
    for line in _MARKED_LINE.finditer(response):
        text = LABEL.sub("", line[1]).strip()
        if text and _is_bare(text):
            marked, marked_at = text, line.start()
    boxes = list(_BOX.finditer(response))
    if boxes and boxes[-1].start() > marked_at:
        return _boxed_answer(response, boxes)
    if marked is not None:
        return marked
    last = _MARKED_LINE.search(response.rstrip().rpartition("\n")[2])
    return last[1].strip() or None if last else None


def _is_bare(text: str) -> bool:
    """Whether ``text`` is an answer without words except a unit."""
    return _NUMBER_WITH_UNIT.fullmatch(text) is not None or not _WORD.search(_COMMAND.sub("", text))


def _boxed_answer(response: str, boxes: list[re.Match[str]]) -> str:
    """The content of the last of ``boxes``, preceded by those that ``_LISTED`` joins to it; empty if it has none."""
    start = boxes[-1].start()
    answer = _content(response, boxes[-1].end(), len(response)).strip()
    answers = [answer] if answer else []
    for box in reversed(boxes[:-1] if answer else []):
        content = _content(response, box.end(), start)
        if not content.strip() or not _LISTED.fullmatch(response, box.end() + len(content) + 1, start):
            break
        start = box.start()
        if content.strip() not in answers:
            answers.insert(0, content.strip())
    return ", ".join(answers)  # the space distinguishes the list 2, 345 from the number 2,345


def _content(response: str, opened: int, end: int) -> str:
    """The text from ``opened``, after an opening brace, to the closing one; empty if none closes it before ``end``."""
    depth = 1
    for position in range(opened, end):
        depth += (response[position] == "{") - (response[position] == "}")
        if depth == 0:
            return response[opened:position]
    return ""
