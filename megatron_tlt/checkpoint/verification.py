"""Verifies published checkpoints in a thread of low priority, while training goes on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_tlt.checkpoint.files import LATEST
from megatron_tlt.checkpoint.manifest import MANIFEST, FileSum, Sums, files_below, verify_manifest
from megatron_tlt.errors import RunError
from megatron_tlt.platform.threads import start_thread

_CHUNK_BYTES = 4 << 20
_LOWEST_PRIORITY = 19
_SETTLE_S = 3.0


class _Stopped(Exception):
    """The thread shall end."""


def damage(folder: Path, *, sums: Sums, wait: Callable[[float], object] = time.sleep) -> list[str] | None:
    """Lists the problems of a checkpoint that its writer may remove or replace meanwhile; None if it is removed.

    Pruning removes a checkpoint file by file. So missing files of one that ``latest`` does not name are damage only if
    no file goes for ``_SETTLE_S`` seconds. A checkpoint that is saved again is verified again.

    Args:
        folder: a checkpoint beside its file ``latest``.
        sums: computes the sums of files.
        wait: sleeps for so many seconds.
    """
    while True:
        version = _version(folder)
        try:
            problems = verify_manifest(folder, sums=sums)
        except RunError as error:  # of a newer release
            problems = [str(error)]
        if not problems:
            return []
        if not _settles(folder, wait):
            return None
        if _version(folder) == version:
            return problems


def _settles(folder: Path, wait: Callable[[float], object]) -> bool:
    """Whether ``folder`` is there to stay; waits while its files are being removed."""
    while folder.is_dir():
        if _is_latest(folder):
            return True
        before = _listing(folder)
        wait(_SETTLE_S)
        if before and before == _listing(folder):
            return True
    return False


def _version(folder: Path) -> tuple[int, int] | None:
    """Differs between a checkpoint and one that has replaced it."""
    try:
        found = (folder / MANIFEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _listing(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # a folder that was removed while it was listed
        return files_below(folder)
    return []


def _is_latest(folder: Path) -> bool:
    try:
        return (folder.parent / LATEST).read_text(encoding="utf-8").strip() == folder.name
    except (OSError, UnicodeDecodeError):
        return False


class BackgroundVerification:
    """Verifies one checkpoint at a time; the methods return at once, except ``close`` with ``wait``.

    The thread has the lowest priority and reads one file at a time, from the disk instead of from the cache of what was
    just written, if the file system allows it. It ends with its process.

    Raises:
        RunError: the thread cannot be started.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all attributes below
        self._waiting: Path | None = None
        self._busy = False
        self._closed = False
        self._found: list[str] | None = None
        self._thread = start_thread(self._run, "verify-checkpoints")

    def start(self, folder: Path) -> None:
        """Verifies ``folder`` once the one in progress is verified; it replaces another that still waits."""
        with self._changed:
            self._waiting = folder
            self._changed.notify_all()

    def poll(self) -> list[str] | None:
        """The problems of the checkpoint that was verified since the last call; None if there was none.

        A checkpoint that was removed meanwhile gives no result.
        """
        with self._changed:
            found, self._found = self._found, None
            return found

    def close(self, *, wait: bool = False) -> None:
        """Ends the thread, with ``wait`` after it has verified what was started; the last result can still be polled.

        Nothing can be started any more.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting is None and not self._busy)
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # Linux: of this thread alone
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                if self._closed or self._waiting is None:
                    return
                folder, self._waiting, self._busy = self._waiting, None, True
            found: list[str] | None = None
            try:
                found = damage(folder, sums=self._sums, wait=self._pause)
            except _Stopped:
                pass
            except Exception as error:  # the thread must not die in silence
                found = [f"{folder}: cannot be verified: {type(error).__name__}: {error}"]
            finally:
                with self._changed:
                    self._busy = False
                    # damage that nobody has polled yet must not be replaced by good news
                    self._found = self._found or found if found is not None else self._found
                    self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, seconds):
                raise _Stopped

    def _sums(self, files: Sequence[Path]) -> list[FileSum]:
        return [self._sum(file) for file in files]

    def _sum(self, path: Path) -> FileSum:
        found = hashlib.sha256()
        try:
            with open(path, "rb", buffering=0) as file:
                _drop_cache(file.fileno())
                while chunk := file.read(_CHUNK_BYTES):
                    if self._closed:
                        raise _Stopped
                    found.update(chunk)
                _drop_cache(file.fileno())  # training has better uses for the memory
        except OSError as error:
            return FileSum(None, error.strerror or str(error))
        return FileSum(found.hexdigest())


def _drop_cache(descriptor: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on every system or file system
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
