"""Selective asynchronous checkpoints of a session: training waits only for a copy; a thread writes (TLT).

Selective: only the given tensors are written, that is a drafter's trainable tensors and their optimizer state, not the
target's embedding and LM head. Asynchronous: ``save`` copies into staging memory and returns; a thread writes.

A session's leader saves every n steps. A preempted session then loses at most n steps and those of the write in
flight. The next session may run on other ranks; it starts from its leader's state or the checkpoint, whichever is
newer::

    checkpointer.save(trainer.version, payload_of(trainer.state, {"step": step}))   # the leader, every n steps
    ...
    checkpointer.wait(timeout_s)                        # the old leader, before a new one reads: one writer at a time
    ...
    found = newest(folder, KIND)                        # the new leader
    if found is not None and found.payload.header["version"] > trainer.version:
        trainer.load_state(state_of(found.payload)[0])
    trainer.synchronize(leader, group)                  # all ranks of the session

A run that resumes from an earlier checkpoint repeats steps that later sessions were trained on. It must start with an
empty folder, or compare the step in the header with its own.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_tlt.checkpoint.files import (
    atomic_folder,
    find_latest_whole,
    set_latest,
)
from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.checkpoint.manifest import write_manifest
from megatron_tlt.checkpoint.payload import STATE, Payload, read_payload, write_payload
from megatron_tlt.checkpoint.publication import remove_older
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.files import write_errors
from megatron_tlt.platform.threads import start_thread
from megatron_tlt.spot.staging import StagingBuffer

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 10


@dataclass(frozen=True)
class CheckpointCounts:
    """Counts of a checkpointer.

    ``stall_s`` is the time that training was blocked in ``save``, ``write_s`` the time that the thread spent writing.
    ``superseded`` saves were replaced by a newer one before their write. ``problem`` is the last failure's message.
    """

    saves: int = 0
    superseded: int = 0
    writes: int = 0
    failed: int = 0
    staged_bytes: int = 0
    written_bytes: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    durable_version: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class _Staged:
    """A save that waits to be written."""

    version: int
    kind: str
    header: dict[str, Any]
    buffer: StagingBuffer


class SelectiveCheckpointer:
    """Writes ``folder/version-N`` with the state and a manifest, points ``latest`` to it, removes old checkpoints.

    At most one write is in flight and one save waits; a newer save replaces the waiting one. A failed write is logged
    and counted but does not affect training or earlier checkpoints.

    Only one process at a time may write to a folder, and only one thread may call the methods. Any process may read the
    folder with :func:`newest` at any time.

    Args:
        folder: for this training's checkpoints only; created if missing, also if it is deleted later.
        keep: number of checkpoints to keep.

    Raises:
        ValueError: ``keep`` is below 1.
        RunError: the thread cannot be started.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; allowed: 1 and more")
        self._folder, self._keep = folder, keep
        self._counts = CheckpointCounts()
        self._changed = threading.Condition()  # guards all attributes below
        self._waiting: _Staged | None = None
        self._free = [StagingBuffer(), StagingBuffer()]
        self._writing = False
        self._closed = False
        self._thread = start_thread(self._write_all, "spot-checkpoint")

    @property
    def counts(self) -> CheckpointCounts:
        """A copy of the current counts."""
        with self._changed:
            return self._counts

    def save(self, version: int, payload: Payload) -> float:
        """Stage a state for writing; the tensors may be overwritten after the return.

        Args:
            version: the state's version; the last save is the newest checkpoint, whatever its version.
            payload: tensors on any device; the memory is reused if names and shapes stay the same.

        Returns:
            Seconds for which the caller was blocked.

        Raises:
            RunError: this checkpointer is closed.
            TypeError: the header is not JSON-serializable.
            ValueError: a negative version.
        """
        began = time.perf_counter()
        if version < 0:
            raise ValueError(f"version is {version}; allowed: 0 and more")
        header = json.loads(json.dumps(payload.header))  # a copy, since training continues to change the header
        buffer = self._take_buffer()
        try:
            buffer.copy_from(payload.tensors)
        except RuntimeError as error:  # out of memory: training continues without this checkpoint
            with self._changed:
                self._free.append(buffer)
            self._fail(version, error)
            return self._count_save(began, 0)
        with self._changed:
            self._waiting = _Staged(version, payload.kind, header, buffer)
            self._changed.notify_all()
        return self._count_save(began, buffer.nbytes)

    def _take_buffer(self) -> StagingBuffer:
        with self._changed:
            if self._closed:
                raise RunError(f"{self._folder}: the checkpointer is closed")
            if self._waiting is None:
                return self._free.pop()
            buffer, self._waiting = self._waiting.buffer, None
            self._counts = replace(self._counts, superseded=self._counts.superseded + 1)
            return buffer

    def _count_save(self, began: float, nbytes: int) -> float:
        stall_s = time.perf_counter() - began
        with self._changed:
            self._counts = replace(
                self._counts,
                saves=self._counts.saves + 1,
                staged_bytes=self._counts.staged_bytes + nbytes,
                stall_s=self._counts.stall_s + stall_s,
            )
        return stall_s

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all saves are written; return False if that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._writing, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait like :meth:`wait`, then end the thread; may be called again."""
        done = self.wait(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if done:
            self._thread.join()
        return done

    def __enter__(self) -> SelectiveCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_all(self) -> None:
        """Thread body: write the newest waiting save until closed."""
        swept = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                staged, self._waiting = self._waiting, None
                if staged is None:
                    return
                self._writing = True
            began = time.perf_counter()
            try:
                if not swept:
                    clean_leftovers(self._folder)  # of a killed leader
                    swept = True
                self._write(staged)
            except Exception as error:  # training continues after any failure, and the next save retries
                self._fail(staged.version, error)
            finally:
                with self._changed:
                    self._counts = replace(self._counts, write_s=self._counts.write_s + time.perf_counter() - began)
                    self._free.append(staged.buffer)
                    self._writing = False
                    self._changed.notify_all()

    def _write(self, staged: _Staged) -> None:
        staged.buffer.wait()
        nbytes = staged.buffer.nbytes
        folder = self._folder / f"version-{staged.version:09d}"
        with atomic_folder(folder, nbytes) as temporary, write_errors(folder, nbytes):
            write_payload(temporary / STATE, Payload(staged.kind, staged.header, staged.buffer.tensors))
            write_manifest(temporary)
        set_latest(self._folder, folder.name)
        with self._changed:
            self._counts = replace(
                self._counts,
                writes=self._counts.writes + 1,
                written_bytes=self._counts.written_bytes + nbytes,
                durable_version=staged.version,
            )
        remove_older(folder, self._keep)

    def _fail(self, version: int, error: Exception) -> None:
        problem = f"checkpoint of version {version} failed: {error}"
        logger.warning("%s", problem)
        with self._changed:
            self._counts = replace(self._counts, failed=self._counts.failed + 1, problem=problem)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint and the folder that it was read from."""

    folder: Path
    payload: Payload


def newest(folder: Path, kind: str) -> LoadedCheckpoint | None:
    """The newest intact checkpoint in ``folder``; None if there is none.

    A damaged checkpoint is skipped with a warning. Another process may write at the same time: if a checkpoint is
    removed while it is read, a newer one exists, and the search restarts.

    Raises:
        ConfigError: the checkpoint is of another kind than ``kind``.
        RunError: the file system refuses access.
    """
    found: LoadedCheckpoint | None = None
    warnings: list[str] = []
    for _ in range(_READ_ATTEMPTS):
        before = _listing(folder)
        try:
            path, warnings = find_latest_whole(folder)
            found = LoadedCheckpoint(path, read_payload(path / STATE, kind)) if path is not None else found
            if path is not None and not warnings:
                return found
        except (OSError, ConfigError) as error:
            if _listing(folder) != before:
                continue
            if isinstance(error, OSError):
                raise RunError(f"{folder}: cannot be read: {error}") from error
            raise
        if _listing(folder) == before:
            break
    for warning in warnings:
        logger.warning("%s", warning)
    return found


def _listing(folder: Path) -> frozenset[tuple[str, int]]:
    """Names and inodes, which change whenever a checkpoint is added, removed or replaced."""
    try:
        with os.scandir(folder) as entries:
            return frozenset((entry.name, entry.inode()) for entry in entries if not entry.name.startswith("."))
    except OSError:
        return frozenset()
