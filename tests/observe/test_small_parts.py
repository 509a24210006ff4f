"""Progress, summary, environment, benchmark output."""

from __future__ import annotations

import getpass
import io
import itertools
import json
import math
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_tlt.bench.result import BenchmarkResult, interleave, ratio_of_medians
from megatron_tlt.errors import RunError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.progress import Progress, session_line
from megatron_tlt.observe.summary import (
    SUMMARY_KEYS,
    describe_lengths,
    flatten,
    read_summary,
    reward_summary,
    time_totals,
    write_summary,
)
from tests.observe.synthetic import undocumented_keys


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_progress(stream: io.StringIO, rank: int = 0, enabled: bool = True) -> str:
    with Progress(rank, 2, enabled=enabled, stream=stream) as progress:
        progress.start("rollout", 8)
        progress.advance(8)
        progress.start("update")
        progress.advance()
        progress.message("saved [bold]x")
        progress.step_done(1, {"reward/mean": 0.25, "time/total": 3.21, "unknown": 1.0})
    return stream.getvalue()


def test_progress_is_plain_where_there_is_no_terminal() -> None:
    assert run_progress(io.StringIO()) == "saved [bold]x\nstep 1/2  reward 0.250  s 3.2\n"


def test_progress_draws_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = run_progress(Terminal())
    assert "update" in shown and "1/?" in shown and "step 1/2  reward 0.250" in shown and "[bold]x" in shown


def test_progress_is_silent_elsewhere() -> None:
    assert run_progress(Terminal(), rank=1) == ""
    assert run_progress(Terminal(), enabled=False) == ""


def test_summary_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"eval": {"start": {"pass_at_1": 0.25}}, "steps": 3, "reward": {"mean": math.nan}})
    summary = read_summary(path)
    assert summary["eval"]["start"]["pass_at_1"] == 0.25 and summary["reward"]["mean"] is None
    assert flatten(summary) == {"eval.start.pass_at_1": 0.25, "steps": 3, "reward.mean": None}
    path.write_text("[]")
    with pytest.raises(RunError, match=r"summary\.json: must be a JSON object"):
        read_summary(path)
    with pytest.raises(RunError, match=r"cannot read .*none\.json"):
        read_summary(tmp_path / "none.json")


def test_flat_keys_are_paths() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2]}


def test_documented_keys() -> None:
    assert undocumented_keys({key.replace("*", "x"): 1 for key in SUMMARY_KEYS}) == []
    assert undocumented_keys({"rollout": {"lenght": {"max": 1}}}) == ["rollout.lenght.max"]


def test_numbers_for_the_summary() -> None:
    lengths = describe_lengths([*range(1, 101), 1000])
    assert lengths["median"] == 51 and lengths["max"] == 1000 and lengths["p90"] == 91 and lengths["p99"] == 100
    assert lengths["max_over_median"] == pytest.approx(1000 / 51) and lengths["mean"] == pytest.approx(6050 / 101)
    assert describe_lengths([]) == {} and math.isnan(describe_lengths([0, 0])["max_over_median"])
    rows: list[dict[str, float | None]] = [
        {"step": 0, "eval/greedy": 0.5},
        {"step": 1, "time/rollout": 2.0, "time/extra": 1.0, "reward/mean": 0.5},
        {"step": 2, "time/rollout": 3.0, "time/update": None, "reward/mean": 1.0},
    ]
    totals = time_totals(rows)
    assert totals["rollout"] == 5.0 and totals["update"] == 0.0 and totals["extra"] == 1.0
    assert reward_summary(rows) == {"first": 0.5, "last": 1.0, "mean": 0.75} and reward_summary([]) == {}


def test_environment_says_what_but_not_whose() -> None:
    environment = describe_environment()
    assert environment["cores"] >= 1 and environment["memory_gib"] > 0 and environment["cpu"]
    assert environment["python"].startswith("3.") and environment["device"] in ("cpu", "cuda")
    text = json.dumps(environment)
    for private in (socket.gethostname(), os.getcwd(), os.path.expanduser("~")):
        assert private not in text
    # a user called "x86" or "root" may be part of a processor's name by chance; a path to a home never is
    assert f"/{getpass.getuser()}" not in text and "://" not in text


def test_benchmark_result(tmp_path: Path) -> None:
    result = BenchmarkResult({"cpu": "x"}, "speculation")
    result.rows += [{"case": "on", "seconds": 1.0}, {"case": "off", "seconds": 2.5, "note": "plain"}]
    assert result.all_met
    assert result.target("speed-up", 2.5, ">=", 1.5)
    assert not result.target("slow", 2.5, "<", 1.5)
    assert not result.target("unknown", math.nan, ">=", 0)
    assert not result.all_met
    with pytest.raises(ValueError, match="op '!='"):
        result.target("x", 1, "!=", 1)
    with pytest.raises(ValueError, match="exists already"):
        result.target("slow", 1, "<", 2)
    result.write(tmp_path / "b.json")
    written = json.loads((tmp_path / "b.json").read_text())
    assert sorted(written) == ["environment", "name", "rows", "targets"]
    assert written["targets"]["slow"] == {"value": 2.5, "target": 1.5, "op": "<", "met": False}
    assert written["targets"]["unknown"]["value"] is None
    console = Console(file=io.StringIO(), width=100)
    result.print(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "speculation" in shown and "plain" in shown and ">= 1.5" in shown and "no" in shown


@pytest.mark.parametrize(("columns", "lies"), [(4, False), (40, True)])
def test_a_table_too_wide_for_its_console_lies_down_and_loses_nothing(columns: int, lies: bool) -> None:
    rows = [{f"measured_{c}": f"value-{r}-{c}" for c in range(columns)} for r in range(7)]
    rows[0]["only_here"] = "once"
    console = Console(file=io.StringIO(), width=80)
    BenchmarkResult({}, "wide", rows).print(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80
    assert all(value in shown for row in rows for value in row.values())
    assert shown.count("wide") == 1 and shown.count("┏") == (2 if lies else 1)
    assert ("measured 3  │ value-0-3  │ value-1-3 " in shown) == lies


def test_what_all_rows_share_is_printed_once_above_the_table() -> None:
    rows = [{"case": str(i), "model": "tiny", "seconds": float(i)} for i in range(4)]
    console = Console(file=io.StringIO(), width=80)
    BenchmarkResult({}, "shared", rows).print(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.startswith("model: tiny\n") and shown.count("tiny") == 1


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2))
def test_interleave_rotates(number: int, repeats: int, warmups: int) -> None:
    order: list[int] = []
    cases = {str(i): (lambda i=i: order.append(i)) for i in range(number)}
    times = interleave(cases, repeats, warmups)
    assert {name: len(values) for name, values in times.items()} == {str(i): repeats for i in range(number)}
    rounds = [order[at : at + number] for at in range(0, len(order), number)]
    assert len(rounds) == repeats + warmups
    assert all(sorted(one) == list(range(number)) for one in rounds)
    firsts = [one[0] for one in rounds]
    assert all((b - a) % number == 1 % number for a, b in itertools.pairwise(firsts))


def test_interleave_measures_seconds() -> None:
    import time

    times = interleave({"short": lambda: time.sleep(0.005), "long": lambda: time.sleep(0.05)}, 3)
    assert min(times["long"]) >= 0.05 and min(times["short"]) >= 0.005
    assert ratio_of_medians(times["long"], times["short"])["ratio"] > 1.5
    with pytest.raises(ValueError, match="repeats"):
        interleave({}, 0)


POSITIVE = st.floats(1e-3, 1e3)


@settings(max_examples=50)
@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=9), st.floats(0.1, 10))
def test_ratio_of_medians(pairs: list[tuple[float, float]], scale: float) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    found = ratio_of_medians(a, b)
    assert found["low"] <= found["ratio"] <= found["high"]
    assert ratio_of_medians([x * scale for x in b], b)["ratio"] == pytest.approx(scale)
    assert ratio_of_medians(b, a)["ratio"] == pytest.approx(1 / found["ratio"])


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [math.nan])])
def test_ratio_of_medians_refuses(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError):
        ratio_of_medians(a, b)


def test_a_session_is_said_draft_by_draft() -> None:
    depths = {"loss_depth_1": 1.234, "loss_depth_2": 2.0, "acceptance_depth_1": 0.5, "acceptance_depth_2": 0.25}
    found = {"steps": 3.0, "version": 12.0, "acceptance_length": 1.625, **depths}
    metrics = {f"drafter/{name}": value for name, value in found.items()}
    assert session_line(metrics) == (
        "  drafter: 3 steps to version 12  loss 1.23 2.00  accepted 0.50 0.25  length 1.62"
    )
    assert session_line(metrics | {"drafter/steps": 0.0}) is None and session_line({"reward/mean": 1.0}) is None
