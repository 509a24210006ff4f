"""Small file systems, which can be filled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_tlt.bench.fault_parts.trial import NotPossible


@contextmanager
def mounted(folder: Path, size: int | str) -> Iterator[Path]:
    """A file system at a new ``folder``; ``size`` as mount takes it: bytes, or a text such as 256k.

    Raises:
        NotPossible: this user may not mount one.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        raise NotPossible("mounting a file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
