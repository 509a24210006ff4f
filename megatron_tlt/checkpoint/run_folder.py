"""Verifies everything that a run's folder has, item by item; reads only, also beside the live run.

A run replaces files atomically, and names with a leading dot are temporaries of a writer. A checkpoint that is pruned
meanwhile is not damaged. A folder without a manifest cannot be verified, and its item says so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron_tlt.checkpoint.files import LATEST
from megatron_tlt.checkpoint.manifest import MANIFEST, PENDING, Sums, sha256_sums, verify_manifest
from megatron_tlt.checkpoint.verification import damage
from megatron_tlt.config import violations
from megatron_tlt.config.loader import RESOLVED, read_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import RunError, TltError
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.observe.report_data import LENGTHS_FILE, section
from megatron_tlt.observe.samples import SAMPLES_FILE
from megatron_tlt.observe.summary import SUMMARY_FILE, read_summary
from megatron_tlt.observe.timeline import TRACE_FILE, read_trace

CHECKPOINTS = "checkpoints"
_DRAFTERS = ("drafter/first", "drafter/first_trained", "drafter/newest")
_EXPORTS = ("hf", "adapter")
_APPEND_S = 0.5
"""Time in which a live run completes the line that it is writing."""
_MOST_PROBLEMS = 20
Steps = Literal["each", "ascending", "any"]
"""The steps of a file's rows: each once from 0 or 1 on, ascending with repetitions, or not checked."""


@dataclass(frozen=True)
class RunItem:
    """A file or folder of a run by relative name, with its problems (none: intact) and a note on what was found."""

    name: str
    problems: list[str] = field(default_factory=list)
    note: str = ""


def verify_run(
    folder: Path, *, sums: Sums = sha256_sums, wait: Callable[[float], object] = time.sleep
) -> Iterator[RunItem]:
    """Verifies the items of a run one by one, those first that take no time.

    Args:
        folder: of a run.
        sums: computes the sums of the files of a manifest.
        wait: sleeps for so many seconds, where a live run may be at work on a file.
    """
    return _RunVerification(folder, sums, wait).items()


class _RunVerification:
    def __init__(self, folder: Path, sums: Sums, wait: Callable[[float], object]) -> None:
        self._folder, self._sums, self._wait = folder, sums, wait
        self._config: dict[str, Any] = {}

    def items(self) -> Iterator[RunItem]:
        yield self._read(RESOLVED, self._read_config)
        due = self._steps_due()  # before the files that have to reach it
        yield self._rows(METRICS_FILE, "each", due)
        yield self._rows(LENGTHS_FILE, "each", due)
        samples = bool(section(self._config, "observe", "samples_per_task"))
        if samples or (self._folder / SAMPLES_FILE).exists():
            yield self._rows(SAMPLES_FILE, "ascending", due if samples else 0)
        for file in sorted([*self._folder.glob("timeline.rank*.jsonl"), *self._folder.glob("recording/*.jsonl")]):
            yield self._rows(str(file.relative_to(self._folder)), "any", 0)
        for name, read in ((SUMMARY_FILE, read_summary), (TRACE_FILE, read_trace), ("prompt_files.json", _read_json)):
            if (self._folder / name).exists():
                yield self._read(name, read)
        for root, pattern in ((CHECKPOINTS, "step_*"), ("drafter/spot", "version-*")):
            yield from self._checkpoints(root, pattern)
        for name in _DRAFTERS:
            yield from self._with_manifest(name, needs_manifest=False)
        for name in _EXPORTS:
            yield from self._with_manifest(name, needs_manifest=True)
        for path in sorted(self._folder.glob("reference/step_*")):
            yield from self._with_manifest(str(path.relative_to(self._folder)), needs_manifest=False)

    def _read(self, name: str, read: Callable[[Path], object]) -> RunItem:
        path = self._folder / name
        try:
            read(path)
        except FileNotFoundError:
            return RunItem(name, [f"{path}: missing"])
        except (TltError, OSError, ValueError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            return RunItem(name, [line if str(path) in line else f"{path}: {line}" for line in lines])
        return RunItem(name)

    def _read_config(self, path: Path) -> None:
        self._config = read_resolved(path)
        try:
            TltConfig.model_validate(self._config)
        except ValidationError as error:
            raise RunError("\n".join(f"{path}: {line}" for line in violations.lines(TltConfig, error))) from error

    def _steps_due(self) -> int:
        """Steps that rows must be there for. A checkpoint may be published just before its step's row is written."""
        saved = 0
        with contextlib.suppress(RunError, OSError, ValueError):  # the item of that file says so
            saved = int(_read_latest(self._folder / CHECKPOINTS / LATEST).rpartition("_")[2])
        finished = 0
        with contextlib.suppress(RunError, KeyError, TypeError, ValueError):
            finished = int(read_summary(self._folder / SUMMARY_FILE)["steps"])
        return max(saved - 1, finished, 0)

    def _rows(self, name: str, steps: Steps, due: int) -> RunItem:
        """A JSON lines file, whose rows' ``steps`` are in order and reach ``due``."""
        path = self._folder / name
        try:
            rows = _JsonRows.read(path)
            if rows.torn:
                self._wait(_APPEND_S)  # a live run may be writing the line
                rows = _JsonRows.read(path)
        except FileNotFoundError:
            return RunItem(name, [f"{path}: missing"]) if due else RunItem(name, note="not there yet")
        except OSError as error:
            return RunItem(name, [f"{path}: cannot be read: {error.strerror or error}"])
        problems = [f"{path}: {problem}" for problem in (*rows.wrong, *rows.torn)]
        if steps != "any":
            problems += [f"{path}: {problem}" for problem in _wrong_steps(rows.steps, steps, due)]
        return RunItem(name, problems[:_MOST_PROBLEMS], f"{rows.count} rows")

    def _checkpoints(self, root: str, pattern: str) -> Iterator[RunItem]:
        folder, name = self._folder / root, f"{root}/{LATEST}"
        found = sorted(folder.glob(pattern))
        if not found and not (folder / LATEST).exists():
            return
        yield self._read(name, _read_latest)
        for path in found:
            yield self._checkpoint(path, str(path.relative_to(self._folder)))

    def _checkpoint(self, path: Path, name: str) -> RunItem:
        problems = damage(path, sums=self._sums, wait=self._wait)
        if problems is None:
            return RunItem(name, note="removed meanwhile")
        if not problems and path.parent.name == CHECKPOINTS:
            problems = [line for line in self._read(f"{name}/state.json", _read_state).problems if path.is_dir()]
        return RunItem(name, problems[:_MOST_PROBLEMS])

    def _with_manifest(self, name: str, *, needs_manifest: bool) -> Iterator[RunItem]:
        path = self._folder / name
        if not path.is_dir():
            return
        if not needs_manifest and not any((path / each).is_file() for each in (MANIFEST, PENDING)):
            yield RunItem(name, note=f"not verified: it has no {MANIFEST}")
            return
        try:
            problems = verify_manifest(path, sums=self._sums)
        except RunError as error:  # of a newer release
            problems = [str(error)]
        yield RunItem(name, problems[:_MOST_PROBLEMS])


@dataclass
class _JsonRows:
    """What a JSON lines file has: rows, the ``step`` of each, wrong lines, and an incomplete last line."""

    count: int = 0
    steps: list[int | None] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> _JsonRows:
        found = cls()
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    found.torn.append(f"line {number} is incomplete; a resumed run drops it")
                    break
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if isinstance(row, dict):
                    found.count += 1
                    step = row.get("step")
                    found.steps.append(step if isinstance(step, int) else None)
                else:
                    found.wrong.append(f"line {number} is not a JSON object: {line[:40]!r}")
        return found


def _wrong_steps(found: list[int | None], steps: Steps, due: int) -> Iterator[str]:
    known = [step for step in found if step is not None]
    if len(known) < len(found):
        yield f"{len(found) - len(known)} rows have no step"
    if known and known[0] > 1 and steps == "each":
        yield f"begins with step {known[0]}; allowed: 0 or 1"
    for before, after in itertools.pairwise(known):
        if after < before or (after == before and steps == "each"):
            yield f"step {after} comes after step {before}"
        elif after > before + 1 and steps == "each":
            yield f"no row between steps {before} and {after}"
    if (last := max(known, default=0)) < due:
        yield f"ends after step {last}; the run has done {due} steps or more"


def _read_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _read_latest(path: Path) -> str:
    name = path.read_text(encoding="utf-8").strip()
    if not name or name != Path(name).name or not (path.parent / name).is_dir():
        raise RunError(f"{path}: names {name!r}, which is not a folder of {path.parent}")
    return name


def _read_state(path: Path) -> None:
    state = json.loads(path.read_text(encoding="utf-8"))
    found = state.get("step") if isinstance(state, dict) else None
    number = re.search(r"\d+$", path.parent.name)
    if number is not None and found != int(number[0]):
        raise RunError(f"{path}: has step {found!r}, its folder is {path.parent.name}")
