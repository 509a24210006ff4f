"""The data of a problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One prompt with all data for its verifier.

    ``uid`` is unique over train and held-out sets and stable across runs. ``verifier`` is a name of
    ``rewards.VERIFIERS`` or a function's import path; ``metadata`` is its input in addition to ``answer``, of JSON
    types. ``solution`` is a step-by-step response ending in the answer, for supervised warm-up, if the task provides
    one. ``recurs`` is False if a run never repeats the problem. ``environment`` is the task's section, if its responses
    have several turns; ``tools`` are those that the chat template shows, each with a JSON schema.
    """

    uid: str
    source: str
    prompt: str
    answer: str
    verifier: str
    metadata: dict[str, Any] = field(default_factory=dict)
    solution: str | None = None
    recurs: bool = True
    environment: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
