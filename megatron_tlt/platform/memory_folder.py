"""A launch's folder in the memory of its node: its processes leave there what their successors need."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.owner import Owner

SNAPSHOTS = "TLT_SNAPSHOTS"
"""Environment variable that names the folder to the workers of a launch."""
_OWNER = "owner"


def memory_folder_of(parent: Path, run: Path, node: int) -> Path:
    """The folder below ``parent`` that a launch of the run in the folder ``run`` has on a node, by its number."""
    name = hashlib.sha256(f"{run.resolve()}/{node}".encode()).hexdigest()[:12]
    return parent / f"{_prefix()}{name}"


def _prefix() -> str:
    return f"tlt-{os.getuid()}-"


@contextlib.contextmanager
def memory_folder(parent: Path, run: Path, node: int) -> Iterator[Path]:
    """An empty folder below ``parent`` for one launch of a run on one node; it is removed in the end.

    Also removes what killed launches of the same user left there.

    Raises:
        ConfigError: ``parent`` cannot be written to.
    """
    folder = memory_folder_of(parent, run, node)
    try:
        for left in parent.glob(f"{_prefix()}*"):
            if left == folder or _has_no_owner(left):
                shutil.rmtree(left, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        (folder / _OWNER).write_text(Owner.current().text, encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"elastic.memory_dir: found {parent}: {error.strerror or error}; allowed: a folder in memory that can be "
            "written to"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_no_owner(folder: Path) -> bool:
    """Whether the launch that made the folder is known to have ended."""
    try:
        return Owner.parse((folder / _OWNER).read_text(encoding="ascii")).is_alive() is False
    except (OSError, ValueError):
        return False
