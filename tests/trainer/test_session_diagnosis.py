"""Steps in which the spot trainer trains nothing say why, in their metrics and once on the terminal."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_tlt.drafter import Entry
from megatron_tlt.trainer.session_diagnosis import REASONS, SessionDiagnosis, SessionWarnings
from megatron_tlt.trainer.spot_trainer import SpotReport
from tests.drafter.conftest import load_target, random_entry, write_target
from tests.trainer.threads import Threads, until


def report(released_at: float, entries: int, version: int = 5, sessions: tuple[int, ...] = ()) -> SpotReport:
    return SpotReport(version, released_at, entries=entries, sessions=sessions)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        # the first two engines wait, from second 4 on both
        ([report(2, 4), report(4, 6), report(9.5, 20)], (10, 5.5, "no_order")),
        ([report(2, 4), report(9.5, 20), report(9.25, 6)], (10, 0.25, "short_wait")),
        ([report(2, 4), report(9.5, 20), report(4, 5)], (9, 0.0, "few_entries")),
        ([report(2, 0), report(4, 0), report(9, 0)], (0, 0.0, "no_data")),
        ([report(2, 4, 5, (1,)), report(4, 6), report(9, 20)], (10, 5.0, "no_step")),
        ([report(2, 4, 7, (1,)), report(4, 6), report(9, 20)], (10, 5.0, None)),
    ],
)
def test_why_nothing_was_trained(reports: list[SpotReport], expected: tuple[int, float, str | None]) -> None:
    found = SessionDiagnosis.of(reports, 1, min_replicas=2, min_entries=10, version=5)
    assert (found.entries, found.ready_s, found.reason) == expected
    assert found.metrics == {
        "spot/entries": float(expected[0]),
        "spot/ready_s": expected[1],
        "spot/untrained": float(expected[2] is not None),
        **({f"spot/untrained_{expected[2]}": 1.0} if expected[2] else {}),
    }


def test_an_engine_waits_when_all_its_ranks_do() -> None:
    ranks = [report(1, 4), report(3, 3), report(8, 1), report(2, 1)]
    found = SessionDiagnosis.of(ranks, 2, min_replicas=1, min_entries=7, version=5)
    assert (found.entries, found.ready_s) == (7, 5.0)


def test_each_reason_is_a_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = SessionWarnings(2, 64)
    warnings.check(0, SessionDiagnosis(0, 0.0, "no_data"))  # there never is any in the first step
    warnings.check(1, SessionDiagnosis(24, 0.0, "few_entries"))
    warnings.check(2, SessionDiagnosis(24, 0.0, "few_entries"))
    warnings.check(3, SessionDiagnosis(96, 1.0, None))
    warnings.check(4, SessionDiagnosis(96, 0.25, "short_wait"))
    warnings.check(5, SessionDiagnosis(24, 0.0, "few_entries"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "warning: spot did not train the drafter in step 2: the engines that waited hold 24 responses; a session needs "
        "64 (spot.min_entries)",
        "warning: spot did not train the drafter in step 5: the last engine finished 0.25 s after 2 others "
        "(spot.min_replicas) waited with enough responses",
    ]
    for reason in REASONS:
        SessionWarnings(2, 64).check(1, SessionDiagnosis(1, 1.0, reason))
    assert len(capsys.readouterr().err.splitlines()) == len(REASONS)


@pytest.mark.parametrize(("min_entries", "reason"), [(9, "few_entries"), (8, None)])
def test_of_real_waits(min_entries: int, reason: str | None, tmp_path: Path) -> None:
    target = write_target("qwen2-untied", tmp_path / "qwen2")
    model = load_target(target)
    entries: list[Entry] = [random_entry(model, "eagle", 9, 3, seed) for seed in range(12)]
    with ExitStack() as stack:
        threads = Threads(stack, tmp_path, target, [entries[rank::3] for rank in range(3)], min_entries)
        threads.begin()
        threads.release(0, 1)
        if reason is None:
            until(lambda: threads.trainers[0].version > 1)
        threads.release(2)
        threads.join(0, 1, 2)
        reports = [bubble.report for bubble in threads.bubbles]
    found = SessionDiagnosis.of(reports, 1, 1, min_entries, 0)
    assert (found.entries, found.reason) == (8, reason)
