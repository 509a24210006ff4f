"""A Python whose imports are done: tests start it where they would start ``sys.executable``.

Importing torch, Megatron-Core and vLLM takes a process 8 s of a core and more, and this suite starts hundreds. So one
process per pytest session imports them once and forks (``tests.helpers.warm_server``), and ``warm_python`` is the path
of a program that takes the arguments of ``python``, has such a fork do the work, and behaves as that Python would:
output, environment, status, death by a signal (``tests.helpers.warm_client``). Everything above it is real:
torchrun starts its workers from it without knowing.

What it is not: a process that begins with no module imported, that is its parent's direct child, or that has a hash
seed of its own. Tests about these take ``sys.executable`` (``fresh=True`` in ``tests.helpers.launch``), as does at
least one test for each kind of worker, so that an import which only works after another one is found.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

from tests.helpers.warm_client import receive

FOLDER = Path(__file__).parent
_started: list[str] = []


@cache
def warm_python() -> str:
    """The stand-in's path; the first call starts the server. Where that cannot fork, the real Python, with a warning.

    Forks run on one thread, and only on a CPU. They end with the session.
    """
    folder = Path(tempfile.mkdtemp(prefix="tlt-warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, stand_in = folder / "socket", folder / "python"
    words = (sys.executable, "-IS", FOLDER / "warm_client.py", path)
    stand_in.write_text(f'#!/bin/sh\nexec {" ".join(shlex.quote(str(word)) for word in words)} "$@"\n')
    stand_in.chmod(0o755)
    command = [sys.executable, "-u", "-m", "tests.helpers.warm_server", str(path), str(stand_in)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=FOLDER.parents[1],
        env=server_environment(),
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    said = process.stdout.readline().strip()
    if said != "ready":
        process.wait()
        warnings.warn(f"tests start every process from nothing, which takes long: {said}", stacklevel=2)
        return sys.executable
    _started.append(str(path))
    atexit.register(_stop, process)
    return str(stand_in)


def server_environment() -> dict[str, str]:
    """As the launcher sets it for one thread per process; what libraries read when they are loaded cannot follow."""
    from megatron_tlt.platform.processes import launch_environment

    return {**launch_environment(1), "PYTHONPATH": str(FOLDER.parents[1]), "PYTHONWARNINGS": "ignore"}


def end_forks(mark: str) -> None:
    """Kills the forks whose environment has that mark, and refuses it further ones; none is left when it is back."""
    for path in _started:
        # where the server has ended, so have its forks
        with contextlib.suppress(ConnectionError, FileNotFoundError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            body = json.dumps({"end": mark}).encode()
            connection.sendall(struct.pack("!I", len(body)) + body)
            receive(connection, 1)


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    _started.clear()
