"""A silent drafter is warned of once per cause, with the key to change, and again only after it recovered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.observe.drafter_check import LEAST_ACCEPTANCE, DrafterCheck
from megatron_tlt.observe.lasting_causes import STEPS, StepsCheck
from megatron_tlt.observe.metrics import MetricsWriter, read_metrics
from megatron_tlt.observe.report import write_report

Row = dict[str, float]
FINE: Row = {
    "drafter/failed": 0.0,
    "drafter/entries": 32.0,
    "speculation/drafter_version": 20.0,
    "speculation/gate_open": 0.7,
    "speculation/share_off": 0.4,
    "speculation/share_eagle-3": 0.6,
    "speculation/acceptance_length_eagle": 1.8,
}
IDLE: Row = {"speculation/share_off": 1.0, "speculation/share_eagle-3": 0.0}


def said(rows: list[Row], steps: int = STEPS) -> list[list[str]]:
    check = DrafterCheck(steps)
    return [check.add(row) for row in rows]


def trained(count: int, changed: Row) -> list[Row]:
    """Steps each of which trains the drafter by ten optimizer steps."""
    return [FINE | {"drafter/version": 10.0 * (step + 1)} | changed for step in range(count)]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"drafter/version": 0.0, "drafter/failed": 1.0}, "never been trained: its training fails.* drafter.lr"),
        ({"drafter/version": 0.0, "drafter/entries": 0.0}, "never been trained: no rank's buffer.* drafter.buffer"),
        ({"drafter/version": 0.0, "spot/untrained_few_entries": 1.0}, "too few responses.* spot.min_entries"),
        ({"drafter/version": 0.0, "spot/untrained_short_wait": 1.0}, r"too short\b.* spot.min_replicas"),
        ({"drafter/version": 0.0, "spot/untrained_no_step": 1.0}, "drafter.entries_per_step.* spot.min_steps"),
        ({"drafter/version": 0.0, "spot/untrained_no_order": 1.0}, "no rank joined a session.* spot.min_steps"),
        ({"drafter/version": 0.0}, "sessions end without a step.* drafter.session_steps"),
        ({"drafter/version": 0.0, "spot/sessions": 1.0}, "sessions end without a step.* spot.min_steps"),
        ({**IDLE, "spot/sessions": 1.0}, "never chose the drafter model. Raise spot.min_steps or drafter.lr"),
        ({"speculation/gate_open": 0.0, **IDLE}, "speculation is off.* speculation.adaptive.threshold"),
        (IDLE, "never chose the drafter model.* speculation.adaptive.strategies"),
        ({"speculation/acceptance_length_eagle": 1.02}, "eagle are not accepted: acceptance length 1.02.* drafter.lr"),
        ({"speculation/acceptance_length_ngram": 1.0}, "ngram are not accepted.* speculation.adaptive"),
        ({"speculation/acceptance_length_suffix+eagle3": 1.0}, r"suffix\+eagle3 are not accepted.* drafter.lr"),
        ({"speculation/acceptance_length_eagle3-p50": 1.0}, "eagle3-p50 are not accepted.* drafter.lr"),
    ],
)
def test_each_cause_is_named_alone_and_once(changed: Row, says: str) -> None:
    given = said(trained(3 * STEPS, changed))
    assert [len(texts) for texts in given] == [int(step == STEPS) for step in range(1, 3 * STEPS + 1)]
    assert re.search(says, given[STEPS - 1][0]), given[STEPS - 1]


def test_a_head_that_is_not_trained_in_the_run_has_another_remedy() -> None:
    row = {"speculation/drafter_version": 0.0, "speculation/acceptance_length_eagle3": 1.01}
    assert "Train it in the run (a drafter section)" in said([row], steps=1)[0][0]


def test_a_version_that_stays_is_an_alarm_and_a_new_one_ends_it() -> None:
    versions = [10, 20, 20, 20, 20, 30, 30, 30, 30]
    given = said([FINE | {"drafter/version": float(version)} for version in versions], steps=3)
    assert [len(texts) for texts in given] == [0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert "still has version 20" in given[4][0]


def test_the_reason_is_that_of_the_step_that_warns() -> None:
    rows = [FINE | {"drafter/version": 0.0, f"spot/untrained_{why}": 1.0} for why in ("no_data", "no_data", "no_step")]
    assert "drafter.entries_per_step" in said(rows, steps=3)[2][0]


def test_acceptance_that_fell_says_from_where_and_steps_without_drafts_do_not_count() -> None:
    low, unused = {"speculation/acceptance_length_eagle": 1.01}, dict[str, float]()
    rows = [FINE, low, unused, unused, low, unused, low]
    given = said(rows, steps=3)
    assert [len(texts) for texts in given] == [0, 0, 0, 0, 0, 0, 1]
    assert "acceptance length 1.01, after 1.80" in given[6][0]


def test_a_drafter_that_is_withheld_is_untrained_and_not_unchosen() -> None:
    row = FINE | IDLE | {"drafter/version": 0.0, "speculation/drafter_withheld": 1.0}
    (texts,) = said([row], steps=1)
    assert len(texts) == 1 and "never been trained" in texts[0]


def test_what_is_fine_or_not_measured_is_no_warning() -> None:
    rows = [*trained(3, {}), {}, {"drafter/version": None}]
    assert said(rows, steps=1) == [[]] * 5  # type: ignore[arg-type]
    static = [{"speculation/share_ngram-3": 1.0, "speculation/acceptance_length_ngram": LEAST_ACCEPTANCE}]
    assert said(static, steps=1) == [[]]


def test_the_report_says_it_once(tmp_path: Path) -> None:
    untrained = FINE | {"drafter/version": 0.0}
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        for step in range(1, STEPS + 3):
            metrics.log(step, untrained)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [text.split(":")[0] for text in DrafterCheck().of_run(rows)] == [f"Step {STEPS}"]
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count(f"Step {STEPS}: the drafter has never been trained") == 1


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc"))), max_size=30),
)
def test_a_cause_is_new_exactly_when_it_has_held_long_enough(
    steps: int, history: list[tuple[set[str], set[str]]]
) -> None:
    causes = StepsCheck(steps)
    lasted, warned, total = dict.fromkeys("abc", 0), set[str](), 0
    for holding, unknown in history:
        new = causes.count(sorted(holding), unknown)
        for name in "abc":
            if name in holding:
                lasted[name] += 1
            elif name not in unknown:
                lasted[name] = 0
                warned.discard(name)
        expected = [name for name in sorted(holding) if lasted[name] >= steps and name not in warned]
        warned.update(expected)
        total += len(expected)
        assert (new, causes.active, causes.warnings) == (expected, len(warned), total)
