"""Checksums of the files of a folder in memory, in a file of that folder."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from pathlib import Path

from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import atomic_write_text

SUMS = "sums.json"


def write_file_sums(folder: Path, leave_out: Collection[str] = ()) -> None:
    """Writes size and CRC-32 of every file below ``folder`` but those named; they do not change meanwhile.

    Raises:
        RunError: a file cannot be read, or the sums cannot be written.
    """
    left_out = {SUMS, *leave_out}
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in left_out)
    found = {str(file.relative_to(folder)): _size_and_sum(file) for file in files}
    atomic_write_text(folder / SUMS, json.dumps(found), durable=False)


def check_file_sums(folder: Path) -> None:
    """Compares the files with what :func:`write_file_sums` wrote.

    Raises:
        RunError: a file, or the sums themselves, are missing or have changed; names the file.
    """
    try:
        expected: dict[str, list[int]] = dict(json.loads((folder / SUMS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder / SUMS}: not readable: {error}") from error
    for name, sums in expected.items():
        if (found := _size_and_sum(folder / name)) != sums:
            raise RunError(f"{folder / name}: found size and checksum {found}; expected {sums}")


def _size_and_sum(file: Path) -> list[int]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RunError(f"{file}: not readable: {error.strerror or error}") from error
    return [len(data), zlib.crc32(data)]
