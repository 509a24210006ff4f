"""Manifests: sizes and SHA-256 sums of a folder's files, which reveal any damage.

``manifest.json`` is ``{"format": 1, "files": {"actor/__0_0.distcp": {"bytes": 12, "sha256": "..."}, ...}}``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import atomic_write_text, sync_file, sync_folder, write_errors

MANIFEST = "manifest.json"
PENDING = ".manifest.json.rewriting"
"""The next manifest of a folder whose files are being replaced (:func:`rewriting`)."""
_STAGED = ".rewriting"
FORMAT = 1
# For each older format, converts a manifest's JSON to the next format. A release that raises FORMAT adds one.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
HASH_THREADS = 8


class ManifestError(RunError):
    """A manifest that is missing or unusable."""


class NewerFormatError(RunError):
    """A newer release wrote the manifest: it is not damaged, but this release cannot read it."""


@dataclass(frozen=True)
class FileSum:
    """SHA-256 of a file in hexadecimal; None if it cannot be read, with the reason in ``problem``."""

    sha256: str | None
    problem: str = ""


@dataclass(frozen=True)
class ManifestEntry:
    """A manifest's entry for one file."""

    size: int
    sha256: str


Sums = Callable[[Sequence[Path]], list[FileSum]]
"""Computes the sums of files, in order."""


def files_below(folder: Path) -> list[Path]:
    """All files below ``folder``, sorted."""
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _sha256(path: Path) -> FileSum:
    try:
        with open(path, "rb") as file:
            return FileSum(hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        return FileSum(None, error.strerror or str(error))


def sha256_sums(
    files: Sequence[Path], done: Callable[[int], object] = lambda size: None, threads: Executor | None = None
) -> list[FileSum]:
    """Computes the sums of files with the threads of this process, that of a single one without further threads.

    Args:
        files: to hash.
        done: called, by these threads, with the bytes of each file that has been hashed.
        threads: to use; None starts some for several files.
    """

    def summed(path: Path) -> FileSum:
        found = _sha256(path)
        done(path.stat().st_size if path.is_file() else 0)
        return found

    if len(files) == 1:
        return [summed(files[0])]
    if threads is not None:
        return list(threads.map(summed, files))
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # hashing releases the GIL
        return list(pool.map(summed, files))


def write_manifest(folder: Path | str, sums: Sums = sha256_sums) -> Path:
    """Records size and SHA-256 of every file below ``folder`` in its ``manifest.json``; call it last.

    Raises:
        RunError: there is no file, or one cannot be read.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    listed = [file for file in files_below(folder) if file != path]
    if not listed:
        raise RunError(f"{folder}: no file for a {MANIFEST}; was the folder emptied?")
    _write(path, _entries(folder, listed, sums))
    return path


def _entries(folder: Path, listed: Sequence[Path], sums: Sums) -> dict[str, ManifestEntry]:
    entries = {}
    for file, found in zip(listed, sums(listed), strict=True):
        if found.sha256 is None:
            raise RunError(f"{file}: cannot be read: {found.problem}")
        entries[file.relative_to(folder).as_posix()] = ManifestEntry(file.stat().st_size, found.sha256)
    return entries


def _write(path: Path, entries: Mapping[str, ManifestEntry]) -> None:
    files = {name: {"bytes": entry.size, "sha256": entry.sha256} for name, entry in entries.items()}
    atomic_write_text(path, json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n")


@contextlib.contextmanager
def rewriting(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder whose files, and manifest, replace those of ``folder`` on success.

    The weights are verifiable at any time. The new manifest is written as ``PENDING`` before the first file moves;
    until it replaces the old one, weights that match either manifest are complete. If the process dies in between, the
    next call moves the rest. If the block fails, ``folder`` is unchanged. Only one process may write at a time. Raises
    RunError if the folder is not writable.
    """
    staged, old = folder / _STAGED, dict[str, ManifestEntry]()
    with write_errors(folder / MANIFEST):
        _finish_rewriting(folder)
        for name in (PENDING, MANIFEST):
            clean_leftovers(folder, name)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
    try:
        yield staged
        with contextlib.suppress(ManifestError):
            old = read_manifest(folder)
        new = _entries(staged, files_below(staged), sha256_sums)
        with write_errors(folder / MANIFEST):
            for name in new:
                sync_file(staged / name)
        # An unchanged file keeps its sum: hashing it again would hide damage.
        others = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
        kept = {name: old[name] for name in old.keys() & others.keys()}
        unknown = others.keys() - old.keys() - new.keys() - {MANIFEST}
        listed = [others[name] for name in sorted(unknown) if not name.startswith(f"{_STAGED}/")]
        added = _entries(folder, listed, sha256_sums)
        _write(folder / PENDING, kept | added | new)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    with write_errors(folder / MANIFEST):
        _finish_rewriting(folder)


def _finish_rewriting(folder: Path) -> None:
    if not (folder / PENDING).is_file():
        return
    staged = folder / _STAGED
    for file in files_below(staged):
        os.replace(file, folder / file.relative_to(staged))
    sync_folder(folder)
    os.replace(folder / PENDING, folder / MANIFEST)
    sync_folder(folder)
    shutil.rmtree(staged, ignore_errors=True)


def read_manifest(folder: Path, name: str = MANIFEST) -> dict[str, ManifestEntry]:
    """The files of ``folder`` by relative name; the manifest ``name`` may be of an older release.

    Raises:
        NewerFormatError: a newer release wrote it.
        ManifestError: it is missing, unreadable, or names no file.
    """
    path = folder / name
    try:
        manifest = _migrated(path, json.loads(path.read_text(encoding="utf-8")))
        entries = {str(name): ManifestEntry(int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
    except FileNotFoundError:
        raise ManifestError(f"{path}: missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path}: unreadable ({type(error).__name__}: {error})") from error
    if not entries:
        raise ManifestError(f"{path}: names no file")
    return entries


def _migrated(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    version = int(manifest["format"])
    if version > FORMAT:
        raise NewerFormatError(
            f"{path}: format {version}, written by a newer release of megatron-tlt; this one reads up to {FORMAT}: "
            "install the newer release, or move the folder away"
        )
    while version < FORMAT:
        manifest = MIGRATIONS[version](manifest)
        version += 1
    return manifest


def verify_manifest(
    folder: Path | str,
    *,
    hashes: bool = True,
    sums: Sums = sha256_sums,
    select: Callable[[str], bool] | None = None,
) -> list[str]:
    """Lists problems of ``folder``, one per line; empty if it is complete.

    Every file of the manifest must exist with its size and, unless ``hashes`` is False, its sum. Files that the
    manifest does not name are ignored. A folder that is being rewritten may match ``PENDING`` instead. With ``select``,
    only files whose relative names it accepts are checked, and each of these must be in the manifest. Raises
    NewerFormatError if a newer release wrote the manifest.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [f"{folder}: no such folder"]
    rewritten = (folder / PENDING).is_file()
    problems = _problems(folder, MANIFEST, hashes, sums, select)
    # PENDING may have replaced the manifest since
    if (
        rewritten
        and problems
        and not all(_problems(folder, name, hashes, sums, select) for name in (PENDING, MANIFEST))
    ):
        return []
    return problems


def _problems(folder: Path, manifest: str, hashes: bool, sums: Sums, select: Callable[[str], bool] | None) -> list[str]:
    try:
        entries = read_manifest(folder, manifest)
    except ManifestError as error:
        return [str(error)]
    problems: list[str] = []
    if select is not None:
        entries = {name: entry for name, entry in entries.items() if select(name)}
        there = {file.relative_to(folder).as_posix() for file in files_below(folder)}
        problems += [f"{folder / name}: not in {MANIFEST}" for name in sorted(there - set(entries)) if select(name)]
        if not entries:
            problems.append(f"{folder / MANIFEST}: names none of the weights' files")
    listed: list[tuple[Path, ManifestEntry]] = []
    for name, entry in entries.items():
        file = folder / name
        problem = _wrong_at_a_glance(file, PurePosixPath(name), entry)
        if problem:
            problems.append(problem)
        else:
            listed.append((file, entry))
    if hashes:
        problems += _wrong_sums(listed, sums([file for file, _ in listed]))
    return problems


def _wrong_at_a_glance(file: Path, name: PurePosixPath, entry: ManifestEntry) -> str | None:
    if name.is_absolute() or ".." in name.parts:
        return f"{MANIFEST} names a file outside its folder: {name}"
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError as error:
        return f"{file}: {error.strerror or error}"
    if size is None:
        return f"{file}: missing"
    return None if size == entry.size else f"{file}: {size} bytes, the manifest says {entry.size}"


def _wrong_sums(listed: Sequence[tuple[Path, ManifestEntry]], found: Sequence[FileSum]) -> Iterator[str]:
    for (file, entry), now in zip(listed, found, strict=True):
        if now.sha256 is None:
            yield f"{file}: cannot be read: {now.problem}"
        elif now.sha256 != entry.sha256:
            yield f"{file}: SHA-256 differs from the manifest's"
