"""Lenient reader of a run's folder: a missing or damaged file becomes a note, never a crash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megatron_tlt.errors import RunError
from megatron_tlt.observe.jsonl import read_jsonl
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.observe.samples import SAMPLES_FILE
from megatron_tlt.observe.summary import SUMMARY_FILE, read_summary
from megatron_tlt.observe.timeline import ENGINE_TRACK, TRACE_FILE, read_trace

CONFIG_FILE = "config.resolved.yaml"
LENGTHS_FILE = "lengths.jsonl"
RUN_FILES = (METRICS_FILE, SUMMARY_FILE, TRACE_FILE, LENGTHS_FILE, CONFIG_FILE)
"""Files that a report uses; a folder without any of them contains no run."""

T = TypeVar("T")


@dataclass
class RunData:
    """The data of a run; absent files give empty fields and a note.

    ``metrics``: one row per step (``step``, then numbers or None). ``lengths``: one row per step with ``lengths``
    (tokens), ``finish_reasons`` (reason -> count), ``acceptance`` (tokens per decode step of each response).
    ``samples``: one row per response chosen for reading; may be empty.
    """

    name: str
    metrics: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    trace: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric; rows without it are left out."""
        pairs = [(row["step"], row[name]) for row in self.metrics if is_number(row.get(name))]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]

    def all_lengths(self) -> list[float]:
        """Every response's length in tokens."""
        return [value for row in self.lengths for value in numbers(row.get("lengths"))]


def is_number(value: Any) -> bool:
    """Whether ``value`` can be plotted."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def numbers(values: Any) -> list[float]:
    """The numbers in ``values``, which may have any type."""
    return [float(v) for v in values if is_number(v)] if isinstance(values, Sequence) else []


def section(nested: Mapping[str, Any], *path: str) -> Any:
    """``nested[path[0]][path[1]]...``, or None if a part is missing."""
    found: Any = nested
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def load_run(folder: Path | str, *, traced: bool = True) -> RunData:
    """Reads a run's folder, its timeline only if ``traced``; raises RunError if the folder does not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"cannot report on {folder}: no such folder")
    run = RunData(name=folder.resolve().name)

    def piece(file: str, read: Callable[[Path], T], empty: T) -> T:
        path = folder / file
        if not path.exists():
            run.notes.append(f"{file} is missing; its plots are left out.")
            return empty
        try:
            return read(path)
        except (RunError, OSError, ValueError, yaml.YAMLError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            run.notes.append(f"{file} cannot be read ({first_line.replace(str(path), file)}); left out.")
            return empty

    no_rows: list[dict[str, Any]] = []
    run.metrics = [row for row in piece(METRICS_FILE, read_jsonl, no_rows) if is_number(row.get("step"))]
    run.lengths = [row for row in piece(LENGTHS_FILE, read_jsonl, no_rows) if is_number(row.get("step"))]
    if (folder / SAMPLES_FILE).exists():  # this file is optional
        run.samples = piece(SAMPLES_FILE, read_jsonl, no_rows)
    if traced:
        run.trace = piece(TRACE_FILE, read_trace, {})
    run.summary = piece(SUMMARY_FILE, read_summary, {})
    run.config = piece(CONFIG_FILE, _read_yaml, {})
    name = section(run.config, "run", "name")
    if isinstance(name, str):
        run.name = name
    return run


def _read_yaml(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"must be a mapping, found {type(config).__name__}")
    return config


@dataclass(frozen=True)
class Bar:
    """A span of the drawn timeline; ``start`` and ``duration`` in seconds since the start of the step."""

    row: str
    category: str
    start: float
    duration: float


@dataclass(frozen=True)
class StepTimeline:
    """One step's spans per row (a rank, or another track of it), and counters: name -> rank -> [(seconds, value)]."""

    step: int
    rows: list[str]
    bars: list[Bar]
    counters: dict[str, dict[int, list[tuple[float, float]]]]


@dataclass(frozen=True)
class Stretch:
    """Engine steps with one strategy and batch; times in seconds since the first engine step of the rollout."""

    strategy: str
    batch: int
    start: float
    duration: float
    ms_per_step: float
    tokens_per_request: float


def last_rollout(trace: Mapping[str, Any]) -> list[Stretch]:
    """The newest rollout's engine steps on the rank that decoded longest; empty if there are none."""
    spans = [e for e in trace.get("traceEvents", []) if isinstance(e, dict) and e.get("ph") == "X"]
    events = [e for e in spans if e.get("cat") == ENGINE_TRACK and is_number(section(e, "args", "rollout"))]
    if not events:
        return []
    # a step may have several rollouts, if the policy is evaluated
    newest = max((e["args"]["step"], e["args"]["rollout"]) for e in events)
    events = [e for e in events if (e["args"]["step"], e["args"]["rollout"]) == newest]
    last = max(events, key=lambda e: e["ts"] + e["dur"])
    rows = [e for e in events if e["pid"] == last["pid"]]
    origin = min(e["ts"] for e in rows)
    return [
        Stretch(
            str(e["name"]),
            int(e["args"]["batch"]),
            (e["ts"] - origin) / 1e6,
            e["dur"] / 1e6,
            float(e["args"]["ms_per_step"]),
            float(e["args"]["tokens_per_request"]),
        )
        for e in rows
    ]


def last_step_timeline(trace: Mapping[str, Any], max_rows: int = 64) -> StepTimeline | None:
    """The newest step with a rollout, else the newest step, of a merged trace; None if there is none."""
    events = [e for e in trace.get("traceEvents", []) if isinstance(e, dict)]
    spans = [
        e
        for e in events
        if e.get("ph") == "X" and e.get("cat") != ENGINE_TRACK and is_number(section(e, "args", "step"))
    ]
    if not spans:
        return None
    step = max((e["args"]["step"] for e in spans if e.get("cat") == "rollout"), default=None)
    if step is None:
        step = max(e["args"]["step"] for e in spans)
    spans = [e for e in spans if e["args"]["step"] == step]
    origin = min(e["ts"] for e in spans)
    end = max(e["ts"] + e["dur"] for e in spans)
    track_names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"
    }

    def label(pid: int, tid: int) -> str:
        return f"rank {pid}" if tid == 0 else f"rank {pid} · {track_names.get((pid, tid), tid)}"

    keys = sorted({(e["pid"], e["tid"]) for e in spans})[:max_rows]
    bars = [
        Bar(label(e["pid"], e["tid"]), str(e.get("cat")), (e["ts"] - origin) / 1e6, e["dur"] / 1e6)
        for e in spans
        if (e["pid"], e["tid"]) in keys
    ]
    counters: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for event in events:
        if event.get("ph") != "C" or not origin <= event["ts"] <= end:
            continue
        for name, value in event["args"].items():
            points = counters.setdefault(name, {}).setdefault(event["pid"], [])
            points.append(((event["ts"] - origin) / 1e6, float(value)))
    return StepTimeline(int(step), [label(*key) for key in keys], bars, counters)
