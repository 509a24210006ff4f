"""One thread of another process stops for a while, and all others go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_CONT, _SEIZE, _INTERRUPT, _DETACH = 7, 0x4206, 0x4207, 17
_WALL = 0x40000000
_POLLS = {"x86_64": {7, 232, 271, 281}, "aarch64": {22, 73}}[os.uname().machine]
"""Numbers of poll, epoll_wait, ppoll and epoll_pwait."""


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, thread, None, None):
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.ENOSYS):
            pytest.skip("holding a thread of another process is not allowed here")
        raise OSError(number, os.strerror(number))


def listener(port: int) -> int:
    """The process that takes connections at a TCP port of this machine."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
            return found.pid
    raise LookupError(f"nobody listens at port {port}")


def thread_named(pid: int, name: str) -> int:
    """The kernel's number of the thread that is shown as ``name``."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise LookupError(f"process {pid} has no thread {name}")


def _system_call(thread: int) -> int:
    """The number of that in which a stopped thread is; -1 outside."""
    return int(Path(f"/proc/{thread}/syscall").read_text().split()[0])


@contextlib.contextmanager
def held(thread: int) -> Iterator[None]:
    """A debugger's stop of this thread alone, while it waits for messages: elsewhere it might hold Python's lock, and
    with it all other threads."""
    _ptrace(_SEIZE, thread)
    try:
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _WALL)
        while _system_call(thread) not in _POLLS:
            _ptrace(_CONT, thread)
            time.sleep(0.005)
            _ptrace(_INTERRUPT, thread)
            os.waitpid(thread, _WALL)
        yield
    finally:
        _ptrace(_DETACH, thread)
