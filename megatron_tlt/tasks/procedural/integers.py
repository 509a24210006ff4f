"""Answers that are whole numbers."""

from __future__ import annotations

import re

_INTEGER = re.compile(r"[+-]?\d{1,18}")


def integer_closeness(answer: int, given: str) -> float | None:
    """1 if equal, otherwise below 1 by the relative distance; None if ``given`` is not a whole number."""
    if not _INTEGER.fullmatch(given):
        return None
    distance = abs(int(given) - answer)
    return 1.0 if distance == 0 else max(0.0, 0.99 - distance / max(abs(answer), 1))
