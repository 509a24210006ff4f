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

#: The library removes commas and underscores wherever they stand in a number: 1,2 would be 12.
_SEPARATED = re.compile(r"[+-]?\d[\d.]*[,_][\d.,_]*")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")


def load() -> None:
    """Imports the library (seconds), so that the first verification is as quick as the rest."""
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=64)
def _dataset(name: str, params: str = "{}") -> Any:
    """That scores; ``params`` as JSON: some scorers round or compare as their dataset's config says."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(params))


def verify(problem: Problem, response: str) -> Reward:
    """The library's verdict on the response's answer.

    ``problem.metadata`` holds ``dataset``, ``entry`` and, as JSON, the dataset's ``params`` if any. A task in the
    library's own wording (``answer_in`` says where its answer stands) is rewarded with the library's score, which may
    be partial. One in ours, whose answer follows the marker, gets 1 for the full score and else 0; ``answer_format``
    and ``exact`` are those of ``tasks.generator``.
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
