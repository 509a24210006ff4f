"""Atomic folders: complete or absent, with a manifest, and the pointer to the latest one.

A checkpoint root holds one folder per checkpoint (``step-000010``), each with a ``manifest.json`` of its files' sizes
and SHA-256 sums, and a file ``latest`` that names the folder to resume from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_tlt.checkpoint.manifest import MANIFEST, Sums, files_below, sha256_sums, verify_manifest
from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import (
    atomic_write_text,
    disk_full_error,
    free_bytes,
    is_disk_full,
    sync_file,
    sync_folder,
    temporary_sibling,
    write_errors,
)

LATEST = "latest"
_SEARCHES = 4
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_folder(path: Path | str, bytes_wanted: int | None = None) -> Iterator[Path]:
    """Yields a temporary folder that becomes ``path`` on success and is removed on failure.

    In a distributed save one process enters this and passes the yielded path to the others; the block must end with a
    barrier. An existing ``path`` is replaced on success and kept on failure. ``bytes_wanted`` is compared with the free
    space before anything is written. Raises RunError if the disk is full (or would be); names the path and the bytes
    needed.
    """
    path = Path(path)
    with write_errors(path, bytes_wanted):
        path.parent.mkdir(parents=True, exist_ok=True)
    free = free_bytes(path.parent)
    if bytes_wanted is not None and free is not None and free < bytes_wanted:
        raise disk_full_error(path, bytes_wanted)
    temporary = temporary_sibling(path)
    try:
        with write_errors(path, bytes_wanted):
            temporary.mkdir()
        yield temporary
        with write_errors(path, bytes_wanted):
            _sync_tree(temporary)
            _publish(temporary, path)
    except BaseException as error:
        full = isinstance(error, Exception) and is_disk_full(error, temporary)
        written = _tree_bytes(temporary) if full else 0
        shutil.rmtree(temporary, ignore_errors=True)
        if full:
            raise disk_full_error(path, written if bytes_wanted is None else bytes_wanted) from error
        raise


def _publish(temporary: Path, path: Path) -> None:
    old: Path | None = None
    if path.exists():
        # A non-empty folder cannot be replaced by a rename. If the process dies between the two renames,
        # clean_leftovers() restores the old one.
        old = temporary_sibling(path, "old")
        os.rename(path, old)
    try:
        os.rename(temporary, path)
    except OSError:
        if old is not None:
            os.rename(old, path)
        raise
    sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _tree_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in files_below(folder)) if folder.is_dir() else 0


def _sync_tree(folder: Path) -> None:
    for file in files_below(folder):
        sync_file(file)
    for sub in (p for p in folder.rglob("*") if p.is_dir()):
        sync_folder(sub)
    sync_folder(folder)


def set_latest(root: Path | str, name: str) -> None:
    """Points ``root/latest`` to its folder ``name``; raises RunError if ``name`` is not a folder of ``root``."""
    root = Path(root)
    if not name or name != Path(name).name or not (root / name).is_dir():
        raise RunError(f"{root / LATEST}: cannot point to {name!r}: not a folder of {root}")
    atomic_write_text(root / LATEST, name + "\n")


def find_latest_whole(
    root: Path | str, *, hashes: bool = True, sums: Sums = sha256_sums, searches: int = _SEARCHES
) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and a warning for each one that was skipped.

    Takes the checkpoint named by ``latest`` if it is complete, else the newest complete one: by the last number in its
    name, then by the age of its manifest. Returns (None, ...) if there is none.

    Another process may write at the same time. A checkpoint that it removes is not damaged: the search restarts, for at
    most ``searches`` in all. Raises NewerFormatError if a newer release wrote the next checkpoint to check. Skipping it
    would lose its steps, and later its files to ``keep_checkpoints``.
    """
    root = Path(root)
    if not root.is_dir():
        return None, []
    named, problem = _read_latest(root)
    warnings = [problem] if problem else []
    candidates = sorted(
        (p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=_age_key, reverse=True
    )
    if named is not None:
        if named in (p.name for p in candidates):
            candidates.sort(key=lambda p: p.name != named)  # stable sort: the named one first
        else:
            warnings.append(f"{root / LATEST}: names {named!r}, which is not a folder of {root}")
    for candidate in candidates:
        problems = verify_manifest(candidate, hashes=hashes, sums=sums)
        if not problems:
            return candidate, warnings
        removed = not candidate.is_dir()
        # a writer moves ``latest`` before it removes older checkpoints, file by file
        if searches > 1 and (removed or _read_latest(root)[0] != named):
            return find_latest_whole(root, hashes=hashes, sums=sums, searches=searches - 1)
        if not removed:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            warnings.append(f"checkpoint {candidate} is not complete: {problems[0]}{more}")
    return None, warnings


def _read_latest(root: Path) -> tuple[str | None, str | None]:
    """The name in ``latest``, and the problem with that file; None for each if absent."""
    try:
        return (root / LATEST).read_text(encoding="utf-8").strip(), None
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{root / LATEST}: unreadable ({type(error).__name__})"


def latest_step(root: Path | str) -> int:
    """The step in the name that ``latest`` holds, unverified; 0 if there is none."""
    named = _read_latest(Path(root))[0] or ""
    number = re.search(r"\d+$", named)
    return int(number[0]) if number is not None else 0


def _age_key(folder: Path) -> tuple[int, float, str]:
    numbers = re.findall(r"\d+", folder.name)
    try:
        written = (folder / MANIFEST).stat().st_mtime
    except OSError:
        written = 0.0
    return (int(numbers[-1]) if numbers else -1, written, folder.name)
