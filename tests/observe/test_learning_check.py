"""A run that cannot learn is warned of once per cause, after some steps in a row, and again only after it recovered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_tlt.observe.lasting_causes import STEPS
from megatron_tlt.observe.learning_check import LearningCheck
from megatron_tlt.observe.metrics import MetricsWriter
from megatron_tlt.observe.report import write_report

GOOD = {
    "reward/mixed_groups": 0.4,
    "reward/correct": 0.3,
    "reward/extracted": 0.9,
    "reward/verifier_error_share": 0.0,
    "length/truncated": 0.1,
}
#: The shipped default task on a model that was never shown it: no answer is marked, no reward, no gradient.
UNTAUGHT = GOOD | {"reward/mixed_groups": 0.0, "reward/correct": 0.0, "reward/extracted": 0.0}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"reward/verifier_error_share": 1.0}, "verifier fails .* rewards.timeout_s"),
        ({"length/truncated": 1.0}, "are truncated .* rollout.max_response_tokens"),
        ({"reward/extracted": 0.0}, "answer in almost no response.*#### ANSWER"),
        ({"reward/mixed_groups": 0.0, "reward/correct": 0.0}, "every response is wrong.* easier tasks"),
        ({"reward/mixed_groups": 0.0, "reward/correct": 1.0}, "every response is right.* harder tasks"),
        ({"reward/mixed_groups": 0.0}, "all right or all wrong.*temperature"),
        ({"reward/mixed_groups": 0.0, "reward/correct": 0.0, "reward/extracted": 0.0}, "answer in almost no response"),
    ],
)
def test_each_cause_is_named_alone_and_once(changed: dict[str, float], says: str) -> None:
    check = LearningCheck()
    given = [check.add(GOOD | changed) for _ in range(3 * STEPS)]
    assert [len(texts) for texts in given] == [int(step == STEPS) for step in range(1, 3 * STEPS + 1)]
    assert re.search(says, given[STEPS - 1][0]) and (check.active, check.warnings) == (1, 1)


def test_a_good_step_starts_the_count_again_and_recovery_lets_the_warning_come_again() -> None:
    check = LearningCheck(steps=3)
    bad = GOOD | {"reward/mixed_groups": 0.0, "reward/correct": 0.0}
    said = [len(check.add(row)) for row in [bad, bad, GOOD, bad, bad, bad, bad, GOOD, bad, bad, bad]]
    assert said == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert check.warnings == 2


def test_what_is_fine_or_not_measured_is_no_warning() -> None:
    check = LearningCheck(steps=1)
    assert check.add(GOOD) == check.add({}) == check.add({"reward/mixed_groups": None}) == []


def test_two_causes_are_two_warnings_and_the_second_may_come_later() -> None:
    check = LearningCheck(steps=2)
    truncated, both = GOOD | {"length/truncated": 1.0}, GOOD | {"length/truncated": 1.0, "reward/extracted": 0.0}
    assert [len(check.add(row)) for row in (truncated, both, both, truncated)] == [0, 1, 1, 0]
    assert check.active == 1


def test_rewards_that_are_the_same_are_named_once_their_cause_is_gone() -> None:
    check = LearningCheck(steps=2)
    wrong = GOOD | {"reward/mixed_groups": 0.0, "reward/correct": 0.0}
    said = [text for row in (UNTAUGHT, UNTAUGHT, wrong, wrong) for text in check.add(row)]
    assert ["answer in almost no" in said[0], "every response is wrong" in said[1]] == [True, True]


def test_metrics_of_a_run_that_learns_leave_the_report_without_a_warning(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        for step in range(1, 20):
            metrics.log(step, GOOD)
    assert "no learning for" not in write_report(tmp_path).read_text(encoding="utf-8")
