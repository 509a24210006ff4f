"""Publishes a checkpoint from a temporary folder to its name, without blocking the process that writes it."""

from __future__ import annotations

import contextlib
import shutil
import sys
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path

from megatron_tlt.checkpoint.files import atomic_folder, set_latest
from megatron_tlt.checkpoint.manifest import HASH_THREADS, sha256_sums, write_manifest
from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import write_errors
from megatron_tlt.platform.threads import started_pool


def remove_older(folder: Path, keep: int) -> None:
    """Removes the oldest checkpoints beside ``folder``, keeping it and the ``keep`` - 1 before it.

    Failure to remove one is only a warning; the next call tries again.
    """
    root = folder.parent
    # Newer ones exist only after a damaged one was skipped: they must not cause the loss of a complete one.
    kind = folder.name.rstrip("0123456789")
    until = sorted(path for path in root.glob(f"{kind}*") if path.name <= folder.name)
    for old in until[:-keep]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            print(f"warning: cannot remove old checkpoint {old}: {error}", file=sys.stderr, flush=True)


def publication_threads() -> Executor:
    """The threads that publish the checkpoints of a process, one at a time; they serve for the whole run.

    Raises:
        RunError: they cannot be started.
    """
    return started_pool(1 + HASH_THREADS, "publish")


class Publication:
    """Fill ``temporary``, then call ``start``, then ``done``; or ``abandon`` before the start. Raises RunError.

    The names of ``folder``'s siblings sort by age; ``keep`` of them are kept, this one and the newest before it.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._writing = contextlib.ExitStack()
        self.temporary = self._writing.enter_context(atomic_folder(folder))
        self._result: Future[None] | None = None

    def start(self, threads: Executor) -> None:
        """Hashes, renames, moves ``latest`` and removes old checkpoints, in :func:`publication_threads`."""
        self._result = threads.submit(self._publish, threads)

    def _publish(self, threads: Executor) -> None:
        with write_errors(self._folder):
            with self._writing:
                write_manifest(self.temporary, partial(sha256_sums, threads=threads))
            set_latest(self._folder.parent, self._folder.name)
        remove_older(self._folder, self._keep)

    def done(self) -> bool:
        """Whether it is published; raises RunError if publishing failed; existing checkpoints are unchanged."""
        assert self._result is not None, "not started"
        if not self._result.done():
            return False
        try:
            self._result.result()
        except RunError:
            raise
        except Exception as error:  # the other ranks must receive any error
            raise RunError(f"{self._folder}: not published: {type(error).__name__}: {error}") from error
        return True

    def abandon(self, error: RunError) -> RunError:
        """Removes the temporary folder because of ``error``; returns the user's error, which names the checkpoint."""
        if self._result is not None:
            return error
        try:
            with self._writing:
                raise error
        except RunError as last:
            return last
