"""Append-only JSON lines that survive a kill: one object per line, each with its ``step``."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import atomic_write_bytes, write_errors

logger = logging.getLogger(__name__)


def finite(value: Any) -> Any:
    """``value`` with every nested NaN and infinity replaced by None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def dumps(value: Any) -> str:
    """Strict, compact JSON of ``value``; NaN and infinities become null."""
    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Reads the rows of ``path``; an incomplete last line (its writer was killed) is dropped with a warning.

    Raises:
        RunError: the file is missing, or a line other than the last is not a JSON object.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    rows: list[dict[str, Any]] = []
    *whole, tail = data.split(b"\n")
    for number, line in enumerate(whole, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(whole) and not tail:  # a power cut can leave a line of zeros, including the newline
                tail = line
                break
            raise RunError(f"{path}: line {number} is not JSON: {line[:60]!r}") from error
        if not isinstance(row, dict):
            raise RunError(f"{path}: line {number} is a {type(row).__name__}, must be a JSON object")
        rows.append(row)
    if tail:
        logger.warning("%s: line %d is incomplete (its writer was killed); dropped", path, len(rows) + 1)
    return rows


class JsonLinesFile:
    """A JSON lines file opened for appending by one process; opening it removes damaged lines.

    Every append is one write and reaches the operating system before it returns: SIGKILL loses no earlier row. With
    ``sync`` it also reaches the disk, so that neither a power cut nor a lost node loses a row; this flush takes some
    milliseconds per append. Without it, a power cut may lose the rows of the last seconds.

    Damage never prevents a run from continuing: lines that are not JSON objects are dropped with a warning. If more
    than the end is damaged, the original file is kept beside it as ``NAME.damaged``.
    """

    def __init__(self, path: Path | str, *, sync: bool = True) -> None:
        self.path = Path(path)
        self._sync = sync
        with write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._repair()
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open for the lifetime of this object

    def _repair(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        lines = data.splitlines(keepends=True)
        wrong = [i for i, line in enumerate(lines) if not _is_whole(line)]
        if not wrong:
            return
        if wrong == [len(lines) - 1]:
            logger.warning("%s: line %d is incomplete (its writer was killed); dropped", self.path, len(lines))
            with open(self.path, "rb+") as file:
                file.truncate(len(data) - len(lines[-1]))
            return
        kept = self.path.with_name(f"{self.path.name}.damaged")
        atomic_write_bytes(kept, data)
        atomic_write_bytes(self.path, b"".join(line for line in lines if _is_whole(line)))
        numbers = ", ".join(str(i + 1) for i in wrong[:10]) + (", ..." if len(wrong) > 10 else "")
        logger.warning("%s: lines %s are damaged; dropped; the original file is %s", self.path, numbers, kept)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line per row; raises RunError if the disk is full; no partial row remains."""
        data = b"".join(dumps(row).encode("utf-8") + b"\n" for row in rows)
        before = self.size
        with write_errors(self.path, len(data)):
            try:
                view = memoryview(data)
                while view:
                    view = view[self._file.write(view) :]
                if self._sync:
                    os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(before)
                raise

    def truncate_after(self, step: int) -> int:
        """Drops the rows whose ``step`` is greater than ``step``, atomically, and returns their number."""
        rows = read_jsonl(self.path)
        kept = [row for row in rows if not (isinstance(row.get("step"), (int, float)) and row["step"] > step)]
        if len(kept) < len(rows):
            self.replace(kept)
        return len(rows) - len(kept)

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replaces all rows by ``rows``, atomically."""
        atomic_write_bytes(self.path, b"".join(dumps(row).encode("utf-8") + b"\n" for row in rows))
        self._file.close()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        """Closes the file; further appends fail."""
        self._file.close()


def _is_whole(line: bytes) -> bool:
    """Whether ``line``, including its newline, is a row."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False
