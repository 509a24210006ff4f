"""Removes what writers that died left half written."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from pathlib import Path

from megatron_tlt.platform.files import Temporary

logger = logging.getLogger(__name__)


def clean_leftovers(root: Path | str, name: str | None = None) -> list[Path]:
    """Removes partial files that dead processes left directly in ``root``; returns the removed paths.

    Restores a folder that was being replaced if its successor was not completed. Files of a live process are kept.
    Files of a process on another host are kept too, with a warning, until they have not changed for a day
    (``ABANDONED_AFTER_S``). Only writers call this. With ``name``, only temporaries of that file or folder are removed.
    """
    root = Path(root)
    removed: list[Path] = []
    if not root.is_dir():
        return removed
    for path in sorted(root.iterdir()):
        found = Temporary.at(path)
        if found is None or name not in (None, found.name):
            continue
        if not found.is_abandoned():
            if found.owner is None or found.owner.is_alive() is None:
                age = time.time() - found.last_change
                logger.warning("%s: kept: a process on another host may be writing it (%.0f s old)", path, age)
            continue
        home = root / found.name
        if found.kind == "old" and not home.exists():
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                os.rename(path, home)
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed.append(path)
    return removed
