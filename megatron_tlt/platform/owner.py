"""The process that owns a file, and whether that process is alive.

The names of temporary files and the contents of lock files hold an ``Owner``. Other processes, on this host or
another, read it before they remove or take over the file.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

_TEXT = re.compile(r"(?P<host>[A-Za-z0-9.-]+)_(?P<pid>[1-9]\d*)_(?P<started>\d+)")
_MAX_HOSTNAME = 40  # file names have at most 255 bytes
_PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """A process, distinguished from others with the same process id on its host.

    ``host`` is the host name, and a hash of the kernel's boot id and the process id namespace: it differs between two
    containers, and between one machine before and after a reboot. ``started`` is the process's start in clock ticks
    since the boot; unlike a time of day, it does not change when the clock is set.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> Owner:
        """The calling process; raises OSError if /proc is not readable."""
        pid = os.getpid()
        return cls(_host(), pid, _state_and_start(pid)[1])

    @property
    def text(self) -> str:
        """One line of ``A-Z a-z 0-9 . - _``: safe in file names."""
        return f"{self.host}_{self.pid}_{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Parses ``text``; surrounding white space is ignored. Raises ValueError if it is not the text of an owner."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not the owner of a file: {text[:80]!r}")
        return cls(match["host"], int(match["pid"]), int(match["started"]))

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if unknown (another host, or hidden processes)."""
        if self.host != _host():
            return None
        try:
            state, started = _state_and_start(self.pid)
        except OSError:
            return None if psutil.pid_exists(self.pid) else False  # /proc may hide other users' processes
        return started == self.started and state not in "ZX"  # a zombie has ended


@cache
def _host() -> str:
    name = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:_MAX_HOSTNAME] or "host"
    boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = os.readlink(_PROC / "self/ns/pid")
    return f"{name}-{hashlib.sha256(f'{boot}/{namespace}'.encode()).hexdigest()[:12]}"


def _state_and_start(pid: int) -> tuple[str, int]:
    """Fields 3 and 22 of /proc/PID/stat; the name before them may contain spaces and parentheses."""
    fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
