"""Timeline of a run: spans per rank, merged into one Chrome/Perfetto trace.

Each rank appends its events to ``timeline.rank<r>.jsonl``; rank 0 merges them into ``timeline.json`` every few steps.
Times are integer nanoseconds since the Unix epoch, so spans nest exactly; the ranks of one machine share the clock.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.observe.jsonl import JsonLinesFile, dumps, read_jsonl
from megatron_tlt.platform.files import atomic_write_text

PHASES = ("rollout", "idle", "reward", "log_probs", "update", "reshard", "evaluate", "checkpoint", "drafter")
"""Categories with a colour in the report; others are allowed."""

TRACE_FILE = "timeline.json"
MAIN_TRACK = "phases"
ENGINE_TRACK = "engine"
"""Track, and category, of runs of engine steps, below the phases."""
SPOT_TRACK = "spot"
"""Track of drafter training within a rank's idle time."""
RANK_FILE_BYTES = 8 << 20
TRACE_BYTES = 32 << 20

Event = dict[str, Any]


class Timeline:
    """One rank's events, appended to ``folder`` by ``flush()``; without a folder they stay in memory.

    ``now()`` is the wall-clock time at construction, advanced by the monotonic clock. It never goes back within a rank,
    and agrees between ranks of one machine unless the system clock was adjusted between their constructions. Above
    ``max_bytes`` the rank's file drops its older half.
    """

    def __init__(self, rank: int, folder: Path | str | None = None, max_bytes: int = RANK_FILE_BYTES) -> None:
        self.rank = rank
        self.step = 0
        self._max_bytes = max_bytes
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._pending: list[Event] = []
        self._lock = threading.Lock()
        self._file = None if folder is None else JsonLinesFile(rank_file(folder, rank), sync=False)

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return self._now_ns() / 1e9

    def _now_ns(self) -> int:
        return time.perf_counter_ns() + self._offset_ns

    def begin_step(self, step: int) -> None:
        """Assigns the following events to ``step``."""
        self.step = step

    @contextlib.contextmanager
    def span(self, name: str, category: str | None = None, **args: Any) -> Iterator[None]:
        """Records the block, even if it fails. ``category`` is one of PHASES; default is ``name``.

        Spans must nest; activity in parallel with the phases (a thread, a pool) is added on its own track. ``args``
        (JSON values) are shown in the trace.
        """
        step, start = self.step, self._now_ns()
        try:
            yield
        finally:
            self._append(name, category, start, self._now_ns() - start, MAIN_TRACK, step, args)

    def add(
        self,
        name: str,
        start: float,
        duration: float,
        category: str | None = None,
        *,
        track: str = MAIN_TRACK,
        **args: Any,
    ) -> None:
        """Records a span measured elsewhere: ``start`` on the clock of ``now()``, both in seconds."""
        first, last = round(start * 1e9), round((start + duration) * 1e9)
        self._append(name, category, first, max(0, last - first), track, self.step, args)

    def counter(self, name: str, value: float, at: float | None = None) -> None:
        """Records that ``name`` (for instance the running batch) has ``value`` from ``at`` (default: now)."""
        when = self._now_ns() if at is None else round(at * 1e9)
        event = {"kind": "counter", "name": name, "rank": self.rank, "step": self.step, "start_ns": when}
        with self._lock:
            self._pending.append({**event, "value": value})

    def _append(
        self, name: str, category: str | None, start: int, duration: int, track: str, step: int, args: Mapping[str, Any]
    ) -> None:
        event: Event = {"kind": "span", "name": name, "category": category or name, "rank": self.rank, "step": step}
        event |= {"track": track, "start_ns": start, "duration_ns": duration}
        if args:
            event["args"] = dict(args)
        with self._lock:
            self._pending.append(event)

    def to_events(self) -> list[Event]:
        """The events not flushed yet (all without a folder), as plain data for ``merge``."""
        with self._lock:
            return [dict(event) for event in self._pending]

    def flush(self) -> None:
        """Appends the pending events to the rank's file; raises RunError if the disk is full."""
        if self._file is None:
            return
        with self._lock:
            pending, self._pending = self._pending, []
        self._file.append(pending)
        if self._file.size > self._max_bytes:
            rows = read_jsonl(self._file.path)
            self._file.replace(rows[len(rows) // 2 :])

    def truncate_after(self, step: int) -> int:
        """On resume, drops the events of steps after ``step``, so that none exists twice; returns their number."""
        return 0 if self._file is None else self._file.truncate_after(step)

    def close(self) -> None:
        """Flushes and closes the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


def rank_file(folder: Path | str, rank: int) -> Path:
    """Path of a rank's events."""
    return Path(folder) / f"timeline.rank{rank}.jsonl"


def merge(event_lists: Sequence[Sequence[Event]], last_steps: int | None = None) -> dict[str, Any]:
    """One Chrome trace of the ranks' events: times in microseconds since the first event, a process per rank.

    ``last_steps`` keeps that many of the newest steps.
    """
    events = [event for events in event_lists for event in events]
    if last_steps is not None:
        steps = sorted({event["step"] for event in events})[-last_steps:] if last_steps > 0 else []
        events = [event for event in events if event["step"] in set(steps)]
    origin = min((event["start_ns"] for event in events), default=0)
    tracks: dict[int, dict[str, int]] = {}
    rows: list[Event] = []
    # Of spans with equal start, the longer comes first: a viewer nests them in this order.
    for event in sorted(events, key=lambda e: (e["start_ns"], -e.get("duration_ns", 0))):
        rank = event["rank"]
        names = tracks.setdefault(rank, {MAIN_TRACK: 0})
        row: Event = {"name": event["name"], "pid": rank, "ts": (event["start_ns"] - origin) / 1000}
        if event["kind"] == "counter":
            row |= {"ph": "C", "args": {event["name"]: event["value"]}}
        else:
            row |= {"ph": "X", "cat": event["category"], "dur": event["duration_ns"] / 1000}
            row["tid"] = names.setdefault(event.get("track") or event["lane"], len(names))  # "lane" until November 2026
            row["args"] = {"step": event["step"], **event.get("args", {})}
        rows.append(row)
    return {
        "traceEvents": _names(tracks) + rows,
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_ns": str(origin)},
    }


def _names(tracks: Mapping[int, Mapping[str, int]]) -> list[Event]:
    rows: list[Event] = []
    for rank in sorted(tracks):
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        rows.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for track, tid in tracks[rank].items():
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": track}})
            rows.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}})
    return rows


def write_trace(folder: Path | str, last_steps: int | None = None, max_bytes: int = TRACE_BYTES) -> Path:
    """Merges the ranks' files of ``folder`` into its ``timeline.json``, atomically.

    The oldest steps are dropped until it has at most ``max_bytes``; the newest step is always kept. Raises RunError if
    a file is damaged or the disk is full.
    """
    folder = Path(folder)
    lists = [read_jsonl(path) for path in sorted(folder.glob("timeline.rank*.jsonl"))]
    steps = len({event["step"] for events in lists for event in events})
    keep = steps if last_steps is None else min(steps, last_steps)
    while True:
        text = dumps(merge(lists, keep))
        if len(text) <= max_bytes or keep <= 1:
            break
        keep = max(1, min(keep - 1, keep * max_bytes // len(text)))
    path = folder / TRACE_FILE
    # Rewritten every few steps: flushing to disk each time would only slow the run.
    atomic_write_text(path, text + "\n", durable=False)
    return path


def read_trace(path: Path | str) -> dict[str, Any]:
    """A merged trace.

    Raises:
        OSError, ValueError: the file is missing or not JSON.
    """
    trace = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("no traceEvents")
    return trace
