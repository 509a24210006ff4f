"""Folders that are wholly there or not there, their manifest, and the pointer to the latest one.

A checkpoint root holds one folder per checkpoint (``step-000010``), each with a ``manifest.json`` of its files' sizes
and SHA-256 sums, and a file ``latest`` that names the folder to resume from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import (
    atomic_write_bytes,
    atomic_write_text,
    disk_full_error,
    free_bytes,
    is_disk_full,
    sync_file,
    sync_folder,
    temporary_sibling,
    write_errors,
)

__all__ = [
    "LATEST",
    "MANIFEST",
    "atomic_folder",
    "atomic_write_bytes",
    "atomic_write_text",
    "clean_leftovers",
    "find_latest_whole",
    "set_latest",
    "verify_manifest",
    "write_manifest",
]

MANIFEST = "manifest.json"
LATEST = "latest"
_FORMAT = 1
_HASH_THREADS = 8
_LEFTOVER = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old)-\d+-\d+$")
# Temporary folders this process is still writing; never swept away as leftovers.
_in_progress: set[Path] = set()


@contextlib.contextmanager
def atomic_folder(path: Path | str, bytes_wanted: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``path`` when the block ends well, and vanishes when it does not.

    In a distributed save one process enters this and hands the yielded path to the others; the block must end with a
    barrier. An existing ``path`` is replaced; it survives any failure. ``bytes_wanted`` is checked against the free
    space before anything is written.

    Raises:
        RunError: the disk is full (or would be); names the path and the bytes wanted.
    """
    path = Path(path)
    with write_errors(path, bytes_wanted):
        path.parent.mkdir(parents=True, exist_ok=True)
    free = free_bytes(path.parent)
    if bytes_wanted is not None and free is not None and free < bytes_wanted:
        raise disk_full_error(path, bytes_wanted)
    temporary = temporary_sibling(path)
    if temporary.exists():  # the process ids of two containers or hosts may coincide
        shutil.rmtree(temporary)
    _in_progress.add(temporary.absolute())
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
    finally:
        _in_progress.discard(temporary.absolute())


def _publish(temporary: Path, path: Path) -> None:
    old: Path | None = None
    if path.exists():
        # A folder cannot be renamed over a full one. Should the process die between the two renames,
        # clean_leftovers() puts the old one back.
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


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _tree_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in _files(folder)) if folder.is_dir() else 0


def _sync_tree(folder: Path) -> None:
    for file in _files(folder):
        sync_file(file)
    for sub in (p for p in folder.rglob("*") if p.is_dir()):
        sync_folder(sub)
    sync_folder(folder)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_all(files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashing releases the interpreter
        return list(pool.map(_sha256, files))


def write_manifest(folder: Path | str) -> Path:
    """Record size and SHA-256 of every file below ``folder`` in its ``manifest.json``; call it last."""
    folder = Path(folder)
    path = folder / MANIFEST
    listed = [file for file in _files(folder) if file != path]
    files = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(listed, _sha256_all(listed), strict=True)
    }
    atomic_write_text(path, json.dumps({"format": _FORMAT, "files": files}, indent=1, sort_keys=True) + "\n")
    return path


def verify_manifest(folder: Path | str, *, hashes: bool = True) -> list[str]:
    """What is wrong with ``folder``, one line each; empty when it is whole.

    Every file of the manifest must be there with its size and, unless ``hashes`` is off, its sum. Files the manifest
    does not name are ignored.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        return [f"{folder}: no such folder"]
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        entries = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
        version = manifest["format"]
    except FileNotFoundError:
        return [f"{path}: missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{path}: unreadable ({type(error).__name__}: {error})"]
    if version != _FORMAT:
        return [f"{path}: format {version!r}, this release reads {_FORMAT}"]
    problems: list[str] = []
    digests: dict[Path, str] = {}
    for name, (size, digest) in entries.items():
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            problems.append(f"{path}: names a file outside its folder: {name}")
            continue
        file = folder / name
        if not file.is_file():
            problems.append(f"{file}: missing")
        elif file.stat().st_size != size:
            problems.append(f"{file}: {file.stat().st_size} bytes, the manifest says {size}")
        else:
            digests[file] = digest
    if hashes:
        found = zip(digests.items(), _sha256_all(list(digests)), strict=True)
        problems += [f"{file}: SHA-256 differs from the manifest's" for (file, digest), now in found if now != digest]
    return problems


def set_latest(root: Path | str, name: str) -> None:
    """Point ``root/latest`` at its folder ``name``.

    Raises:
        RunError: ``name`` is not a folder of ``root``.
    """
    root = Path(root)
    if not name or name != Path(name).name or not (root / name).is_dir():
        raise RunError(f"{root / LATEST}: cannot point at {name!r}: not a folder of {root}")
    atomic_write_text(root / LATEST, name + "\n")


def find_latest_whole(root: Path | str, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and a warning for each one that had to be passed over.

    The one that ``latest`` names is taken when it is whole, else the newest whole one: by the last number in its name,
    then by the age of its manifest. (None, ...) when there is none.
    """
    root = Path(root)
    if not root.is_dir():
        return None, []
    warnings: list[str] = []
    named: str | None = None
    try:
        named = (root / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        warnings.append(f"{root / LATEST}: unreadable ({type(error).__name__})")
    candidates = sorted(
        (p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=_age_key, reverse=True
    )
    if named is not None:
        if named in (p.name for p in candidates):
            candidates.sort(key=lambda p: p.name != named)  # stable: the named one first
        else:
            warnings.append(f"{root / LATEST}: names {named!r}, which is not a folder of {root}")
    for candidate in candidates:
        problems = verify_manifest(candidate, hashes=hashes)
        if not problems:
            return candidate, warnings
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        warnings.append(f"checkpoint {candidate} is not whole: {problems[0]}{more}")
    return None, warnings


def _age_key(folder: Path) -> tuple[int, float, str]:
    numbers = re.findall(r"\d+", folder.name)
    try:
        written = (folder / MANIFEST).stat().st_mtime
    except OSError:
        written = 0.0
    return (int(numbers[-1]) if numbers else -1, written, folder.name)


def clean_leftovers(root: Path | str) -> list[Path]:
    """Remove what killed processes left half written directly in ``root``; return what was removed.

    A folder that was being replaced is put back when its successor never arrived. Call it before a run starts to write:
    another process's temporary files are taken for leftovers.
    """
    root = Path(root)
    removed: list[Path] = []
    if not root.is_dir():
        return removed
    for entry in sorted(root.iterdir()):
        match = _LEFTOVER.match(entry.name)
        if match is None or entry.absolute() in _in_progress:
            continue
        home = root / match["name"]
        if match["kind"] == "old" and not home.exists():
            os.rename(entry, home)
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        removed.append(entry)
    return removed
