"""reasoning-gym's own verifiers, for the generated tasks."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from megatron_tlt.rewards.extract import formatted_answer, marked_answer
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem
from megatron_tlt.tasks.wording import ANSWER_IN

#: The library removes commas and underscores anywhere in a number, so 1,2 would become 12.
_SEPARATED = re.compile(r"[+-]?\d[\d.]*[,_][\d.,_]*")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")


def load() -> None:
    """Imports the library (takes seconds), so that the first verification is as fast as the others."""
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=64)
def _dataset(name: str, params: str = "{}") -> Any:
    """The dataset whose scorer is used; ``params`` is JSON and matters, as some scorers depend on the config."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(params))


def verify(problem: Problem, response: str) -> Reward:
    """Verifies the response's answer with the library's scorer.

    ``problem.metadata`` has ``dataset``, ``entry`` and, as JSON, the dataset's ``params`` if any. The reward of a task
    with the library's own prompts (``answer_in`` is its answer format) is the library's score, which may be partial. A
    generated task of this package, whose answer follows the marker, gets 1 for the full score and 0 otherwise;
    ``answer_format`` and ``exact`` are those of ``tasks.generator``.
    """
    if ANSWER_IN in problem.metadata:
        return _scored(problem, formatted_answer(response, problem.metadata[ANSWER_IN]))
    extracted = marked_answer(response)
    if extracted is None:
        return Reward(0.0, False)
    metadata = problem.metadata
    words = extracted.split()
    misread = _SEPARATED.fullmatch(extracted) and not _THOUSANDS.fullmatch(extracted)
    if misread or (metadata.get("exact") and words != problem.answer.split()):
        return Reward(0.0, False, extracted)
    answer = str(words) if metadata.get("answer_format") == "list" else extracted
    correct = _dataset(metadata["dataset"]).score_answer(answer, metadata["entry"]) == 1.0
    return Reward(float(correct), correct, extracted)


def _scored(problem: Problem, extracted: str | None) -> Reward:
    if extracted is None:
        return Reward(0.0, False)
    dataset = _dataset(problem.metadata["dataset"], problem.metadata.get("params", "{}"))
    score = float(dataset.score_answer(extracted, problem.metadata["entry"]))
    return Reward(score, score >= 1.0, extracted)
