"""One thread of another process stops for a while, and all others go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, thread, None, None):
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.ENOSYS):
            pytest.skip("holding a thread of another process is not allowed here")
        raise OSError(number, os.strerror(number))


def thread_named(pid: int, name: str) -> int:
    """The kernel's number of the thread that is shown as ``name``."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise LookupError(f"process {pid} has no thread {name}")


@contextlib.contextmanager
def held(thread: int) -> Iterator[None]:
    """A debugger's stop of this thread alone."""
    _ptrace(_SEIZE, thread)
    try:
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _WALL)
        yield
    finally:
        _ptrace(_DETACH, thread)
