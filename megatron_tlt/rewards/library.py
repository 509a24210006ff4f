"""reasoning-gym's own verifiers, for the generated tasks."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_tlt.rewards.extract import marked_answer
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem


def load() -> None:
    """Imports the library (seconds), so that the first verification is as quick as the rest."""
    import reasoning_gym  # noqa: F401


@cache
def _dataset(name: str) -> Any:
    import reasoning_gym

    # Verdicts depend on the entry alone: any config of the data set will do.
    return reasoning_gym.create_dataset(name, seed=0, size=1)


def verify(problem: Problem, response: str) -> Reward:
    """1 when the library gives the marked answer its full score, else 0 (the library's partial scores do not count).

    ``problem.metadata`` holds ``dataset``, ``entry``, and optionally ``answer_format`` and ``exact`` (see
    ``tasks.generator``). A response without the marker has no answer.
    """
    extracted = marked_answer(response)
    if extracted is None:
        return Reward(0.0, False)
    metadata = problem.metadata
    words = extracted.split()
    if metadata.get("exact") and words != problem.answer.split():
        return Reward(0.0, False, extracted)
    answer = str(words) if metadata.get("answer_format") == "list" else extracted
    correct = _dataset(metadata["dataset"]).score_answer(answer, metadata["entry"]) == 1.0
    return Reward(float(correct), correct, extracted)
