"""Atomic writes: a file is either complete or absent.

Everything is written under a temporary sibling name (``.<name>.tmp-<owner>-<n>``), flushed to disk and renamed. A full
disk raises a RunError that names the path and the bytes needed, and leaves no partial file. The owner in the name tells
other processes whether the writer is alive (``platform/owner.py``).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.errors import RunError
from megatron_tlt.platform.owner import Owner

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# torch's zip writer reports a full disk as a plain RuntimeError with one of these texts. It counts as a full disk
# if fewer than _PRACTICALLY_FULL bytes are free.
_TORCH_WRITE_ERRORS = ("PytorchStreamWriter", "inline_container.cc", "iostream error")
_PRACTICALLY_FULL = 1 << 20
_serial = itertools.count()
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<owner>[^/]+)-\d+")
# Without a way to check the writer (another host, an older release), a temporary counts as abandoned if nothing in it
# has changed for this long. Writers write or hash all the time, so hours would do; the hosts' clocks may differ.
ABANDONED_AFTER_S = 24 * 3600.0


def temporary_sibling(path: Path, kind: str = "tmp") -> Path:
    """A hidden name beside ``path``, unique to this process and call."""
    return path.with_name(f".{path.name}.{kind}-{Owner.current().text}-{next(_serial)}")


@dataclass(frozen=True)
class Temporary:
    """A name made by :func:`temporary_sibling` for ``name`` beside it; ``kind`` is "tmp" or "old"."""

    path: Path
    name: str
    kind: str
    owner: Owner | None

    @classmethod
    def at(cls, path: Path) -> Temporary | None:
        """None if ``path`` is not such a name. ``owner`` is None in names from an older release."""
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            return None
        owner = None
        with contextlib.suppress(ValueError):
            owner = Owner.parse(match["owner"])
        return cls(path, match["name"], match["kind"], owner)

    def is_abandoned(self) -> bool:
        """Whether the writer is dead or, if that is unknown, nothing has changed for a day."""
        alive = self.owner.is_alive() if self.owner is not None else None
        if alive is not None:
            return not alive
        return time.time() - self.last_change > ABANDONED_AFTER_S

    @property
    def last_change(self) -> float:
        """Unix time of the newest change to the path or anything below it."""
        paths = [str(self.path)]
        for folder, subfolders, files in os.walk(self.path):
            paths += [os.path.join(folder, name) for name in (*subfolders, *files)]
        newest = 0.0
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # a live writer's files come and go
                newest = max(newest, os.lstat(path).st_mtime)
        return newest


def free_bytes(path: Path) -> int | None:
    """Bytes free on the file system of ``path`` or its nearest existing parent; None if unknown."""
    for candidate in (path, *path.parents):
        if candidate.exists():
            try:
                return shutil.disk_usage(candidate).free
            except OSError:
                return None
    return None


def is_disk_full(error: BaseException, path: Path) -> bool:
    """Whether ``error`` or one of its causes reports a full disk at ``path``."""
    seen: BaseException | None = error
    for _ in range(16):
        if seen is None:
            return False
        if isinstance(seen, OSError) and seen.errno in _DISK_FULL:
            return True
        if "No space left on device" in str(seen):
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in _TORCH_WRITE_ERRORS):
            free = free_bytes(path)
            if free is not None and free < _PRACTICALLY_FULL:
                return True
        seen = seen.__cause__ or seen.__context__
    return False


def disk_full_error(path: Path, wanted: int | None) -> RunError:
    """The one-line error for a full disk; ``wanted`` is in bytes."""
    free = free_bytes(path.parent)
    size = "unknown number of bytes" if wanted is None else f"{wanted} bytes"
    return RunError(f"disk full: cannot write {path}: {size} wanted, {'unknown' if free is None else free} bytes free")


@contextlib.contextmanager
def write_errors(path: Path, wanted: int | None = None) -> Iterator[None]:
    """Converts an OSError in the block to a one-line RunError that names ``path``."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error, path):
            raise disk_full_error(path, wanted) from error
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in ``folder`` durable if the file system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        # Some network file systems refuse fsync on a folder.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flushes the bytes of ``path`` to disk.

    Raises:
        OSError: the disk is full or failed (with delayed allocation, only this call reports it).
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path, wanted: int | None = None, *, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path that is renamed to ``path`` on success and removed on failure.

    A reader sees either the old file or the complete new one. ``durable=False`` skips the flush to disk: safe against a
    killed process, not against a power cut. Parents are created; ``wanted`` (bytes) is for the error message. Raises
    RunError if the disk is full or the path cannot be written; an old file is unchanged.
    """
    temporary = temporary_sibling(path)
    with write_errors(path, wanted):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            if durable:
                sync_file(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)


def atomic_write_bytes(path: Path | str, data: bytes, *, durable: bool = True) -> None:
    """Writes ``data`` with :func:`atomic_file`."""
    with atomic_file(Path(path), len(data), durable=durable) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: Path | str, text: str, *, durable: bool = True) -> None:
    """Writes ``text`` as UTF-8 with :func:`atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode("utf-8"), durable=durable)
