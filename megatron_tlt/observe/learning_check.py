"""Detects from a run's metrics that it cannot learn, and the likely cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_tlt.observe.lasting_causes import Row, StepsCheck
from megatron_tlt.observe.lasting_causes import value_of as _value

# STEPS in a row before a warning: with 16 responses per step, 10 % of them correct, five steps without a mixed group
# have a probability of 0.02 %.
_NEARLY_ALL = 0.95


class _Cause(NamedTuple):
    holds: Callable[[Row], bool]
    message: str


def _no_signal(row: Row) -> bool:
    return _value(row, "reward/mixed_groups", 1.0) == 0.0


_SPECIFIC = {
    "verifier_errors": _Cause(
        lambda row: _value(row, "reward/verifier_error_share", 0.0) >= _NEARLY_ALL,
        "the verifier fails on nearly all responses, which get reward 0; the log names its errors. If they are "
        "time-outs, raise rewards.timeout_s or rewards.workers",
    ),
    "truncated": _Cause(
        lambda row: _value(row, "length/truncated", 0.0) >= _NEARLY_ALL,
        "nearly all responses are truncated at the length limit, before their answer. Raise "
        "rollout.max_response_tokens, or start with a model that ends its responses",
    ),
    "no_answer": _Cause(
        lambda row: _value(row, "reward/extracted", 1.0) <= 1.0 - _NEARLY_ALL,
        "the verifier finds an answer in almost no response. Ask for '#### ANSWER' as the last line in the prompt "
        "(prompt_suffix of a file's params), or start with a model that was trained on such solutions",
    ),
}
_GENERAL = {
    "all_wrong": _Cause(
        lambda row: _no_signal(row) and _value(row, "reward/correct", 1.0) == 0.0,
        "every response is wrong, so the policy loss has no gradient. Use easier tasks, a larger "
        "algorithm.group_size, or a stronger start model",
    ),
    "all_right": _Cause(
        lambda row: _no_signal(row) and _value(row, "reward/correct", 0.0) == 1.0,
        "every response is right, so the policy loss has no gradient. Use harder tasks",
    ),
    "same_rewards": _Cause(
        lambda row: _no_signal(row) and 0.0 < _value(row, "reward/correct", 0.0) < 1.0,
        "the responses to a problem are all right or all wrong, so the policy loss has no gradient. Raise "
        "rollout.sampling.temperature or algorithm.group_size, or use tasks of medium difficulty",
    ),
}


class LearningCheck(StepsCheck):
    """Follows a run's steps; warns once about a cause that holds for ``steps`` steps in a row.

    Equal rewards in all groups cause their own warning only if no specific cause explains them.
    """

    def add(self, row: Row) -> list[str]:
        causes = _SPECIFIC | _GENERAL
        holding = {name for name in causes if causes[name].holds(row)}
        if holding & _SPECIFIC.keys():
            holding -= _GENERAL.keys()
        new = self.count([name for name in causes if name in holding])
        return [f"no learning for {self.steps} steps: {causes[name].message}" for name in new]
