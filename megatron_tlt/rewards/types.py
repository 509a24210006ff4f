"""The result of a verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_tlt.tasks.types import Problem


@dataclass(frozen=True)
class Reward:
    """The verdict on one response.

    ``extracted`` is the judged answer (None: none found). ``error`` is set if the verifier itself failed: it raised,
    exceeded its time limit, or its process died; ``value`` is then 0. ``late``: it exceeded an adaptive limit, which is
    shorter than the configured one, so the response counts as wrong.
    """

    value: float
    correct: bool
    extracted: str | None = None
    error: str | None = None
    late: bool = False


#: Judges a response's text; must be pure, so that the same problem and text always give the same reward.
Verifier = Callable[[Problem, str], Reward]
