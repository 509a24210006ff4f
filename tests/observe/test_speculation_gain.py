"""What speculation gained over a run, as the summary, the report and the terminal say it; nothing silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.observe.metrics import MetricsWriter
from megatron_tlt.observe.report import write_report
from megatron_tlt.observe.speculation_gain import RunGain


def row(seconds: float, plain: float | None = None, coverage: float = 1.0) -> dict[str, float]:
    metrics = {"speculation/rollout_s": seconds, "speculation/gain_coverage": coverage}
    if plain is not None:
        metrics |= {"speculation/plain_rollout_s": plain, "speculation/gain": plain / seconds}
    return metrics


def test_the_gain_is_that_of_all_seconds_in_which_it_is_known() -> None:
    found = RunGain.of([row(1.0, coverage=0.5), row(2.0, 2.0), row(1.0, 4.0), {"reward/mean": 0.1}])
    assert found is not None and (found.gain, found.known_steps, found.steps) == (2.0, 2, 4)
    assert found.unknown is None


def test_the_terminal_says_it_in_a_line_or_why_not() -> None:
    known = {"gain": 1.4321, "gain_steps": 30, "gain_unknown": None}
    assert RunGain.line({"steps": 30, "speculation": known}) == "speculation: 1.43 x the rollout without"
    part = RunGain.line({"steps": 32, "speculation": known})
    assert part == "speculation: 1.43 x the rollout without (in 30 of 32 steps)"
    unknown = {"gain": None, "gain_steps": 0, "gain_unknown": "a reason"}
    assert RunGain.line({"steps": 3, "speculation": unknown}) == "speculation: gain unknown: a reason"
    off = {"gain": None, "gain_steps": 0, "gain_unknown": None}
    assert RunGain.line({"steps": 3, "speculation": off}) is RunGain.line({}) is None


def test_an_unknown_gain_says_why_and_a_run_without_speculation_nothing() -> None:
    found = RunGain.of([row(1.0, coverage=coverage) for coverage in (0.2, 0.4, 0.8)])
    assert found is not None and found.gain is None
    assert "engine steps without drafts were measured near 40% of" in (found.unknown or "")
    assert RunGain.of([{"reward/mean": 0.5}]) is None


@pytest.mark.parametrize(("plain", "shows"), [(3.0, "1.50×"), (None, "unknown")])  # noqa: RUF001
def test_the_report_has_a_tile_of_it(plain: float | None, shows: str, tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.log(1, row(2.0, plain, 1.0 if plain else 0.0))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert shows in page and ("a longer run" in page) == (plain is None)
