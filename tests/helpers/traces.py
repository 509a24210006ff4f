"""Whether a trace viewer would read a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def trace_problems(trace: Mapping[str, Any]) -> list[str]:
    """What a trace viewer would stumble over, one line each: missing fields, disorder, half overlaps in a row."""
    problems: list[str] = []
    open_ends: dict[tuple[int, int], list[float]] = {}
    named = {e["pid"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    previous = -1.0
    for index, event in enumerate(e for e in trace["traceEvents"] if e["ph"] != "M"):
        wanted = {"X": ("name", "cat", "ts", "dur", "pid", "tid"), "C": ("name", "ts", "pid", "args")}.get(event["ph"])
        if wanted is None or any(key not in event for key in wanted):
            problems.append(f"event {index}: phase {event['ph']!r} without all of {wanted}")
            continue
        if event["pid"] not in named:
            problems.append(f"event {index}: process {event['pid']} has no name")
        if event["ts"] < previous:
            problems.append(f"event {index}: starts at {event['ts']} us, after one at {previous} us")
        previous = event["ts"]
        if event["ph"] == "X":
            ends = open_ends.setdefault((event["pid"], event["tid"]), [])
            end = event["ts"] + event["dur"]
            # Microseconds are rounded from nanoseconds; half a nanosecond is no overlap.
            while ends and ends[-1] <= event["ts"] + 5e-4:
                ends.pop()
            if ends and end > ends[-1] + 5e-4:
                problems.append(f"event {index}: {event['name']!r} ends {end - ends[-1]} us after the span it is in")
            ends.append(end)
    return problems
