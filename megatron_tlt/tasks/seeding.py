"""Seeds and splits that depend only on their arguments, not on the process, the platform or the call order."""

from __future__ import annotations

import hashlib


def stable_int(*parts: object) -> int:
    """A 62-bit non-negative integer from the text of ``parts`` (Python's own ``hash`` is salted per process)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def stable_unit(*parts: object) -> float:
    """A number in [0, 1) from the text of ``parts``."""
    return stable_int(*parts) / float(1 << 62)


def is_held_out(prompt: str, fraction: float) -> bool:
    """Whether a prompt belongs to the held-out set.

    Only the text decides, so no prompt is in both sets, whatever the seeds, sizes and weights of a run.
    """
    return stable_unit("held_out", prompt) < fraction
