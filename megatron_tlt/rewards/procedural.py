"""The exact verifier of ``kind: procedural``: reads the answer where the task's wording puts it, and checks it."""

from __future__ import annotations

from megatron_tlt.rewards.extract import formatted_answer, marked_answer
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.marker import ANSWER_MARKER
from megatron_tlt.tasks.types import Problem
from megatron_tlt.tasks.wording import ANSWER_IN

_NO_ANSWER, _UNREADABLE, _NEAR, _LAST = -0.4, -0.2, 0.3, 0.1


def verify(problem: Problem, response: str) -> Reward:
    """1 for a correct answer and 0 otherwise; or, with ``reward: shaped``, from -0.4 to 1.1.

    Shaped: -0.4 without an answer, -0.2 for one that is not of the type asked for, up to 0.3 for a wrong one by its
    closeness, 1 for a correct one, and 0.1 more if nothing follows it. Of Learning from Less only the range is known;
    the parts are ours.
    """
    from megatron_tlt.tasks.procedural import FAMILIES

    metadata = problem.metadata
    place = metadata.get(ANSWER_IN)
    extracted = marked_answer(response) if place is None else formatted_answer(response, place)
    shaped = metadata["reward"] == "shaped"
    if extracted is None:
        return Reward(_NO_ANSWER if shaped else 0.0, False)
    closeness = FAMILIES[metadata["family"]].closeness(problem.answer, metadata["check"], extracted)
    correct = closeness == 1.0
    if not shaped:
        return Reward(float(correct), correct, extracted)
    if closeness is None:
        return Reward(_UNREADABLE, False, extracted)
    if not correct:
        return Reward(_NEAR * closeness, False, extracted)
    return Reward(1.0 + _LAST * _is_last(response, place), True, extracted)


def _is_last(response: str, place: str | None) -> bool:
    if place == "answer_tag":
        return response.rstrip().endswith("</answer>")
    if place == "boxed":
        return response.rstrip().rstrip("$.").endswith("}")
    if place == "last_line":
        return True
    return "\n" not in response.rpartition(ANSWER_MARKER)[2].rstrip()
