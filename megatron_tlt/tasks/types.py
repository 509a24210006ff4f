"""What a task hands to the rest of the house."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One prompt with everything its verifier needs.

    ``uid`` is unique over train and held-out sets and stable from run to run. ``verifier`` is a name of
    ``rewards.VERIFIERS`` or a function's import path; ``metadata`` is what it wants besides ``answer``, as JSON has it.
    ``solution`` is a worked, step-by-step response ending in the answer, where the task can write one: supervised
    warm-up trains on it. ``recurs`` is False where a run never asks for the problem again.
    """

    uid: str
    source: str
    prompt: str
    answer: str
    verifier: str
    metadata: dict[str, Any] = field(default_factory=dict)
    solution: str | None = None
    recurs: bool = True
