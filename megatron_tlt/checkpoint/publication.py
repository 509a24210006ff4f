"""One checkpoint on its way from a temporary folder to its name, without holding up who writes it."""

from __future__ import annotations

import contextlib
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megatron_tlt.checkpoint.files import atomic_folder, set_latest
from megatron_tlt.checkpoint.manifest import write_manifest
from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import write_errors


def remove_older(folder: Path, keep: int) -> None:
    """Removes the oldest checkpoints beside ``folder`` until it and the ``keep`` - 1 before it are left.

    One that cannot be removed is a warning, as nothing is lost by it; the next call tries again.
    """
    root = folder.parent
    # Newer ones are there only after a damaged one was passed over: they are no reason to lose a whole one.
    kind = folder.name.rstrip("0123456789")
    until = sorted(path for path in root.glob(f"{kind}*") if path.name <= folder.name)
    for old in until[:-keep]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            print(f"warning: old checkpoint {old} is not removed: {error}", file=sys.stderr, flush=True)


class Publication:
    """Fill ``temporary``, then ``start``, then ask ``done``; or ``abandon`` it before the start.

    Args:
        folder: what the checkpoint will be called; its neighbours sort by name as they do by age.
        keep: so many checkpoints remain, this one and the newest before it.

    Raises:
        RunError: the file system refuses.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._writing = contextlib.ExitStack()
        self.temporary = self._writing.enter_context(atomic_folder(folder))
        self._result: Future[None] | None = None

    def start(self) -> None:
        """Hashes, renames, moves ``latest`` and removes what is too old, all in a thread."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._result = pool.submit(self._publish)
        pool.shutdown(wait=False)

    def _publish(self) -> None:
        with write_errors(self._folder):
            with self._writing:
                write_manifest(self.temporary)
            set_latest(self._folder.parent, self._folder.name)
        remove_older(self._folder, self._keep)

    def done(self) -> bool:
        """Whether it is published.

        Raises:
            RunError: it could not be; whatever was there before still is.
        """
        assert self._result is not None, "not started"
        if not self._result.done():
            return False
        try:
            self._result.result()
        except RunError:
            raise
        except Exception as error:  # whatever it is, the other ranks must hear of it
            raise RunError(f"{self._folder}: not published: {type(error).__name__}: {error}") from error
        return True

    def abandon(self, error: RunError) -> RunError:
        """Removes the temporary folder because of ``error``; what to tell the user, in terms of the checkpoint."""
        if self._result is not None:
            return error
        try:
            with self._writing:
                raise error
        except RunError as last:
            return last
