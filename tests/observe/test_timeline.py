"""Spans per rank, and the trace made of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.observe.jsonl import read_jsonl
from megatron_tlt.observe.timeline import Timeline, merge, rank_file, read_trace, write_trace
from tests.helpers.traces import trace_problems


def spans(trace: dict) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_span_measures_and_nests() -> None:
    timeline = Timeline(0)
    timeline.begin_step(7)
    before = time.time()
    with timeline.span("rollout", responses=4):
        time.sleep(0.02)
        with timeline.span("wait", "idle"):
            time.sleep(0.01)
    trace = merge([timeline.to_events()])
    outer, inner = spans(trace)
    assert (outer["name"], outer["cat"], outer["args"]) == ("rollout", "rollout", {"step": 7, "responses": 4})
    assert (inner["name"], inner["cat"]) == ("wait", "idle")
    assert outer["ts"] == 0 and 30_000 <= outer["dur"] < 500_000
    assert inner["ts"] >= 20_000 and inner["ts"] + inner["dur"] <= outer["dur"]
    assert abs(int(trace["otherData"]["origin_unix_ns"]) / 1e9 - before) < 0.5
    assert trace_problems(trace) == []


def test_a_failing_span_is_recorded() -> None:
    timeline = Timeline(0)
    with pytest.raises(ValueError), timeline.span("update"):
        raise ValueError
    assert [event["name"] for event in timeline.to_events()] == ["update"]


def test_merge_has_a_named_row_per_rank_and_track() -> None:
    ranks = [Timeline(0), Timeline(1)]
    for rank, timeline in enumerate(ranks):
        timeline.add("rollout", 100.0, 2.0)
        timeline.add("verify", 101.0, 2.0, "reward", track="verifiers")
        timeline.counter("running", 3 - rank, at=101.5)
    trace = merge([timeline.to_events() for timeline in ranks])
    assert trace_problems(trace) == []
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if e["name"].endswith("_name")}
    assert names == {
        (0, None): "rank 0",
        (0, 0): "phases",
        (0, 1): "verifiers",
        (1, None): "rank 1",
        (1, 0): "phases",
        (1, 1): "verifiers",
    }
    counters = [(e["pid"], e["ts"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert counters == [(0, 1_500_000, {"running": 3}), (1, 1_500_000, {"running": 2})]
    json.dumps(trace, allow_nan=False)


def test_problems_are_seen() -> None:
    timeline = Timeline(0)
    timeline.add("a", 1.0, 2.0)
    timeline.add("b", 2.0, 2.0)
    assert "'b' ends" in trace_problems(merge([timeline.to_events()]))[0]
    good = merge([timeline.to_events()[:1]])
    unnamed = {"traceEvents": spans(good)}
    assert "has no name" in trace_problems(unnamed)[0]
    event = spans(good)[0]
    late = {"traceEvents": good["traceEvents"] + [{**event, "ts": -5.0}]}
    assert any("after one at" in problem for problem in trace_problems(late))
    del event["dur"]
    assert "without all of" in trace_problems(good)[0]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1e-9, 5)), min_size=1, max_size=30))
def test_phases_one_after_another_never_overlap(gaps: list[tuple[float, float]]) -> None:
    """What a step records: spans that begin where the last one ended, however short, a million seconds after 1970."""
    timeline = Timeline(0)
    clock = 1.7e9
    for gap, duration in gaps:
        start = clock + gap
        timeline.add("rollout", start, duration)
        timeline.add("idle", start + duration / 2, start + duration - (start + duration / 2))
        clock = start + duration
    assert trace_problems(merge([timeline.to_events()])) == []


def test_flush_truncate_and_trace(tmp_path: Path) -> None:
    for rank in range(2):
        timeline = Timeline(rank, tmp_path)
        for step in range(1, 6):
            timeline.begin_step(step)
            timeline.add("rollout", 10.0 * step, 5.0)
            timeline.flush()
        assert timeline.to_events() == []
        timeline.close()
        again = Timeline(rank, tmp_path)
        assert again.truncate_after(3) == 2
        again.close()
    path = write_trace(tmp_path)
    assert path.name == "timeline.json"
    trace = read_trace(path)
    assert trace_problems(trace) == []
    assert sorted({e["args"]["step"] for e in spans(trace)}) == [1, 2, 3]
    write_trace(tmp_path, last_steps=2)
    assert sorted({e["args"]["step"] for e in spans(read_trace(path))}) == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "timeline.json",
        "timeline.rank0.jsonl",
        "timeline.rank1.jsonl",
    ]


def test_sizes_are_bounded(tmp_path: Path) -> None:
    timeline = Timeline(0, tmp_path, max_bytes=20_000)
    for step in range(1, 401):
        timeline.begin_step(step)
        timeline.add("rollout", float(step), 0.5)
        timeline.flush()
        assert rank_file(tmp_path, 0).stat().st_size <= 20_000
    timeline.close()
    steps = [event["step"] for event in read_jsonl(rank_file(tmp_path, 0))]
    assert steps == list(range(steps[0], 401)) and len(steps) > 50
    path = write_trace(tmp_path, max_bytes=4_000)
    assert path.stat().st_size <= 4_000
    kept = [e["args"]["step"] for e in spans(read_trace(path))]
    assert kept == list(range(kept[0], 401)) and len(kept) > 5


def test_no_rank_has_written_yet(tmp_path: Path) -> None:
    assert read_trace(write_trace(tmp_path))["traceEvents"] == []


def test_threads_lose_nothing(tmp_path: Path) -> None:
    timeline = Timeline(0, tmp_path)

    def work() -> None:
        for value in range(500):
            timeline.counter("running", value)
            if value % 50 == 0:
                timeline.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    assert len(read_jsonl(rank_file(tmp_path, 0))) == 2000


def test_ranks_of_one_machine_share_the_clock() -> None:
    """Another process reads its clock between two readings of ours."""
    here = Timeline(0)
    code = (
        "from megatron_tlt.observe.timeline import Timeline\nt = Timeline(1)\n"
        "input(); print(repr(t.now()), flush=True); input()"
    )
    there = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert there.stdin is not None and there.stdout is not None
    before = here.now()
    there.stdin.write("\n")
    there.stdin.flush()
    now = float(there.stdout.readline())
    after = here.now()
    there.communicate("\n")
    assert before - 1e-3 <= now <= after + 1e-3
