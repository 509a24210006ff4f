"""Runs untrusted Python programs in bubblewrap: no network, no host files, bounded memory, time and processes."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_FIRST_USER, _USERS = 1 << 30, 1 << 29
"""As root, each program runs under a user id of its own from here on, so that its processes are counted alone."""
_FILE, _PYTHON = "/tmp/program.py", "/python"
_OUTPUT_BYTES = 1 << 20
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program: wall-clock seconds, bytes of address space, processes and threads, bytes of files."""

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    processes: int = 32
    file_bytes: int = 16 << 20


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended, and what it printed (at most a megabyte)."""

    end: Literal["exit", "signal", "timeout"]
    status: int
    stdout: str

    @property
    def succeeded(self) -> bool:
        return self.end == "exit" and self.status == 0


def run_sandboxed(program: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs a program with this Python's standard library; its process tree is gone when this returns.

    The program sees the system's libraries and an empty ``/tmp`` of ``file_bytes``. It runs as an unprivileged user, in
    namespaces of its own (files, processes, network), and the limit on processes counts its own alone.
    """
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        source, given, printed = Path(folder, "program.py"), Path(folder, "stdin"), Path(folder, "stdout")
        source.write_text(program, encoding="utf-8", errors="replace")
        given.write_text(stdin, encoding="utf-8", errors="replace")
        reading, writing = os.pipe()
        with given.open("rb") as input_file, printed.open("wb") as output, open(reading, "rb") as info:
            try:
                process = subprocess.Popen(
                    _command(source, limits, writing),
                    stdin=input_file,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8"},
                    start_new_session=True,
                    pass_fds=(writing,),
                )
            finally:
                os.close(writing)
            first = None
            try:
                first = _first_process(info.read())
                status = process.wait(limits.seconds)
                end: Literal["exit", "signal", "timeout"] = "exit" if status >= 0 else "signal"
            except subprocess.TimeoutExpired:
                status, end = -9, "timeout"
            finally:
                process.kill()  # bubblewrap's children die with it, as their namespace's first process does
                process.wait()
                _wait_for_the_end(first)
        with printed.open("rb") as output_file:
            text = output_file.read(_OUTPUT_BYTES).decode("utf-8", "replace")
    return SandboxResult(end, status, text)


def _first_process(info: bytes) -> int | None:
    """A file descriptor of the first process of the program's namespace; None if it has ended or never began."""
    try:
        return os.pidfd_open(json.loads(info)["child-pid"])
    except (ValueError, ProcessLookupError):
        return None


def _wait_for_the_end(first: int | None) -> None:
    """Waits until a namespace's first process is gone, which the kernel lets go last, after all the others."""
    if first is not None:
        ended = select.poll()
        ended.register(first, select.POLLIN)
        ended.poll()
        os.close(first)


@cache
def sandbox_problem() -> str | None:
    """Why no program can be run in a sandbox on this machine; None if it can."""
    for tool in ("bwrap", "prlimit", *(("setpriv",) if os.getuid() == 0 else ())):
        if shutil.which(tool) is None:
            package = "bubblewrap" if tool == "bwrap" else "util-linux"
            return f"there is no {tool}; install the system's package {package}"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        source = Path(folder, "program.py")
        source.write_text("print('it runs')")
        command = _command(source, SandboxLimits(seconds=20))
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.stdout.strip() == "it runs":
        return None
    reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    return f"bubblewrap cannot start a program here ({reason}); user namespaces must be permitted"


def _command(source: Path, limits: SandboxLimits, info: int | None = None) -> list[str]:
    python = f"{_PYTHON}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    places = [*((folder, folder) for folder in _SYSTEM), (sys.base_prefix, _PYTHON)]
    bound = [part for folder, place in places for part in ("--ro-bind-try", folder, place)]
    users, drop = ["--unshare-user"], []
    if os.getuid() == 0:
        # root is exempt from the limit on processes in any namespace, and may read what others may not: it sets up the
        # namespaces, and becomes nobody inside
        user = str(_FIRST_USER + secrets.randbelow(_USERS))
        users, drop = [], ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
        drop += ["--inh-caps=-all", "--bounding-set=-all"]
    return [
        "bwrap",
        *users,
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--clearenv"),
        *(() if info is None else ("--info-fd", str(info))),
        *bound,
        *("--proc", "/proc", "--dev", "/dev"),
        *(
            "--perms",
            "1777",
            "--size",
            str(limits.file_bytes),
            "--tmpfs",
            "/tmp",
            "--ro-bind",
            str(source),
            _FILE,
            "--chdir",
            "/tmp",
        ),
        *("--setenv", "HOME", "/tmp", "--setenv", "PYTHONIOENCODING", "utf-8"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LD_LIBRARY_PATH", f"{_PYTHON}/lib"),
        *drop,
        *("prlimit", f"--as={limits.memory_bytes}", f"--nproc={limits.processes}", "--core=0"),
        *(f"--fsize={limits.file_bytes}", f"--cpu={int(limits.seconds) + 1}"),
        *(python, "-I", "-B", _FILE),
    ]
