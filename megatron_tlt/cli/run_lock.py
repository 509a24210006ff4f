"""The lock on a run's folder: only one process at a time trains there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt.errors import ConfigError, RunError

LOCK = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, as it wrote itself into the file; ``since`` is local time."""

    pid: int
    host: str
    since: str
    job: str

    @classmethod
    def current(cls) -> LockHolder:
        return cls(os.getpid(), socket.gethostname(), time.strftime("%F %T"), os.environ.get("SLURM_JOB_ID", ""))

    @classmethod
    def read(cls, descriptor: int) -> LockHolder | None:
        """The holder named in an open lock file, or None."""
        try:
            return cls(**json.loads(os.pread(descriptor, 4096, 0)))
        except (OSError, ValueError, TypeError):
            return None

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host} since {self.since}{job}"


class RunLock:
    """Holds ``.lock`` in a run's folder (``flock``) until it is closed or its process ends in any way.

    The file is never removed, so that no process locks a file that another one deletes. The lock survives ``exec``: a
    worker that replaces its launcher keeps it. The server of a network file system may notice late that a host is gone,
    so a lock of another host is waited for. If the file system has no locks, a warning says so.

    Args:
        folder: the run's folder; created if missing.
        wait_s: maximum wait for a lock of another host, as a requeued job may meet its own lock.

    Raises:
        ConfigError: another process holds it; names process, host and start.
        RunError: the folder is not writable.
    """

    def __init__(self, folder: Path, wait_s: float = 120.0) -> None:
        path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunError(f"run.dir: cannot write {path}: {error.strerror or error}") from error
        try:
            self._take(folder, time.monotonic() + wait_s)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(asdict(LockHolder.current())).encode(), 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, folder: Path, until: float) -> None:
        waiting = False
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = LockHolder.read(self._descriptor)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise RunError(f"run.dir: cannot lock {folder / LOCK}: {error.strerror or error}") from error
                print(f"warning: {folder} has no file locks: a second run in it is not detected", file=sys.stderr)
                return
            if holder is None or holder.host == socket.gethostname() or time.monotonic() > until:
                who = holder or "another process"
                raise ConfigError(f"run.dir: {folder} is used by {who}; allowed: a folder that no other run uses")
            if not waiting:
                print(f"waiting for the lock of {folder}, held by {holder}", file=sys.stderr, flush=True)
            waiting = True
            time.sleep(0.5)

    def keep_over_exec(self) -> None:
        """Lets the program that replaces this process hold the lock."""
        os.set_inheritable(self._descriptor, True)

    def close(self) -> None:
        os.close(self._descriptor)
