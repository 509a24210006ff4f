"""The file of finished measurements, the processes that add to it, and the benchmark result made from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.observe.jsonl import JsonLinesFile, read_jsonl
from megatron_tlt.platform.processes import launch_environment
from tools.bench.gpu_measure.environment import gpu_state
from tools.bench.gpu_measure.measurement import Measurement, Settings

_LOG_LINES = 30
_RESERVE_S = 8.0
"""Left of a call's time after its last measurement, for the result."""
Rows = dict[str, list[list[dict[str, Any]]]]
"""By measurement: the rows of each finished repeat."""
Judge = Callable[[BenchmarkResult, Rows], None]


class Record:
    """``PART.jsonl``: a line with the settings and the commit, then one per measurement that finished or failed.

    Raises:
        ValueError: the file holds measurements of other settings, or of another commit.
    """

    def __init__(self, path: Path, settings: Settings, commit: str | None = None) -> None:
        self.path, self.settings = path, settings
        head = {"settings": dataclasses.asdict(settings), "commit": commit}
        self._file = JsonLinesFile(path)  # drops a line that its writer, ended by a time limit, left incomplete
        self.lines = read_jsonl(path)
        if not self.lines:
            self.add(head)
        if self.lines[0] != head:
            raise ValueError(f"{path}: found other settings, {self.lines[0]}, than {head}; allowed: another --out")

    def add(self, line: dict[str, Any]) -> None:
        """Appends a line and keeps it."""
        self._file.append([line])
        self.lines.append(line)

    @property
    def rows(self) -> Rows:
        """Rows of finished measurements, without failed ones."""
        found: Rows = {}
        for line in self.lines[1:]:
            if "failure" not in line:
                found.setdefault(line["measurement"], []).append(line["rows"])
        return found

    def finished(self, name: str) -> int:
        """Number of finished repeats."""
        return len(self.rows.get(name, ()))

    def tried(self, name: str) -> int:
        """Number of repeats, finished or failed."""
        return sum(line["measurement"] == name for line in self.lines[1:])

    def seconds(self, name: str) -> float | None:
        """Duration of the last finished repeat; None without any."""
        seconds = [line["seconds"] for line in self.lines[1:] if line["measurement"] == name and "failure" not in line]
        return seconds[-1] if seconds else None


def missing(record: Record, measurements: Sequence[Measurement], repeats: int) -> list[Measurement]:
    """Measurements with fewer than ``repeats`` finished repeats, those that were tried least first.

    A failure counts as a try: one that fails in every call comes after the others have had as many.
    """
    few = [one for one in measurements if record.finished(one.name) < repeats]
    return sorted(few, key=lambda one: (record.tried(one.name), -record.finished(one.name)))


def measure_missing(
    record: Record,
    measurements: Sequence[Measurement],
    environment: Mapping[str, Any],
    out: Path,
    repeats: int,
    until: float,
    *,
    cwd: Path,
) -> list[str]:
    """Adds at most one repeat of each measurement that lacks some; returns the names of those that failed.

    A measurement that is not expected to end before ``until`` (of ``time.monotonic``) is left to the next call. One
    that takes longer than ``limit_seconds`` is ended, so that the others have their turn.
    """
    failed = []
    for measurement in missing(record, measurements, repeats):
        left = until - _RESERVE_S - time.monotonic()
        expected = record.seconds(measurement.name) or expected_seconds(measurement, record.settings)
        if left <= expected or left <= 0:
            print(f"{measurement.name}: {left:.0f} s left, about {expected:.0f} s needed; run again", flush=True)
            continue
        print(f"{measurement.name}: repeat {record.finished(measurement.name) + 1}", flush=True)
        log = out / "logs" / f"{record.path.stem}-{measurement.name.replace(' ', '-').replace('/', '-')}.log"
        line = run_measurement(measurement, record.settings, log, min(left, limit_seconds(measurement)), cwd)
        record.add({**line, "repeat": record.finished(measurement.name) + 1, "environment": dict(environment)})
        if "failure" in line:
            failed.append(measurement.name)
            print(f"{measurement.name}: {line['failure']['type']}: {line['failure']['message']}", flush=True)
        else:
            print(f"{measurement.name}: {line['seconds']:.1f} s", flush=True)
    return failed


def expected_seconds(measurement: Measurement, settings: Settings) -> float:
    """How long a measurement takes that has not run yet: a lean one about half, a rehearsal is not worth a guess."""
    if settings.small:
        return 0.0
    return measurement.expected_s * (0.5 if settings.lean else 1.0)


def limit_seconds(measurement: Measurement) -> float:
    """Twice what a measurement of full sizes is expected to take: longer than that it hangs."""
    return 2 * measurement.expected_s


def run_measurement(
    measurement: Measurement, settings: Settings, log: Path, limit_s: float, cwd: Path
) -> dict[str, Any]:
    """Runs a measurement in its own process group; its line has ``rows``, and ``failure`` where it failed.

    A failed one keeps the rows that it had emitted.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    before = gpu_state()
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with tempfile.TemporaryDirectory() as work, log.open("w", encoding="utf-8") as output:
        job = {
            "function": measurement.function,
            "given": measurement.given,
            "settings": dataclasses.asdict(settings),
            "out": str(log.parent.parent),
        }
        Path(work, "job.json").write_text(json.dumps(job), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.gpu_measure.child", str(Path(work, "job.json"))],
            cwd=cwd,
            env=child_environment(settings, cwd),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            _kill_group(process)
        seconds = time.monotonic() - began
        rows = list(read_jsonl(Path(work, "rows.jsonl"))) if Path(work, "rows.jsonl").is_file() else []
        line: dict[str, Any] = {
            "measurement": measurement.name,
            "date": started,
            "seconds": round(seconds, 2),
            "rows": rows,
            "gpu_before": before,
            "gpu_after": gpu_state(),
        }
        if status == 0:
            return line
        return line | {"failure": _failure(Path(work, "error.json"), log, status, limit_s)}


def child_environment(settings: Settings, cwd: Path) -> dict[str, str]:
    """A launch's variables; on a GPU with vLLM's own log level, whose lines name backends, graphs and memory."""
    threads = min(8, os.cpu_count() or 1) if settings.on_gpu else 1
    path = os.pathsep.join([str(cwd), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = {**launch_environment(threads), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    own = {"VLLM_LOGGING_LEVEL": "INFO"} if settings.on_gpu else {"TORCHDYNAMO_DISABLE": "1"}
    return {**own, **found}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a measurement's processes: an engine's own process must not keep the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(error: Path, log: Path, status: int | None, limit_s: float) -> dict[str, Any]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    if status is None:
        return {"type": "TimeLimit", "message": f"still running after {limit_s:.0f} s", "log": lines}
    if error.is_file():
        return {**json.loads(error.read_text(encoding="utf-8")), "log": lines}
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    return {"type": "Ended", "message": f"the process ended with {ended}", "log": lines}


def write_result(
    record: Record,
    part: str,
    judge: Judge,
    measurements: Sequence[Measurement],
    environment: Mapping[str, Any],
    out: Path,
) -> BenchmarkResult:
    """Writes ``PART.json``: all rows, the part's targets, and incomplete ones for what is missing.

    Rows of a rehearsal say so, and meet no target: each is incomplete. Rows of lean sizes say so, too.
    """
    name = f"gpu_measure {part}{', lean' if record.settings.lean else ''}"
    result = BenchmarkResult(environment=dict(environment), name=name)
    rehearsal = record.settings.small or not record.settings.on_gpu
    label = {"rehearsal": True} if rehearsal else {"lean": True} if record.settings.lean else {}
    for name, repeats in record.rows.items():
        for number, rows in enumerate(repeats, start=1):
            for row in rows:
                own = {} if "unavailable" in row else label  # nothing ran
                result.rows.append({"measurement": name, "repeat": number, **own, **row})
    for measurement in measurements:
        if not record.finished(measurement.name):
            result.incomplete(f"{measurement.name}: not measured")
    judge(result, record.rows)
    if rehearsal:
        for name in list(result.targets):
            result.incomplete(name)
    result.write(out / f"{part}.json")
    return result
