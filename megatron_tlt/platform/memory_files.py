"""Files on tmpfs whose pages are all there before they are mapped."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import IO


def allocate(opened: IO[bytes], size: int) -> None:
    """Gives an open file ``size`` bytes of memory; pages that it has are kept, those beyond are given back.

    A page that is missing in a mapping would end the process.

    Raises:
        OSError: there is too little memory.
    """
    missing = size - 512 * os.fstat(opened.fileno()).st_blocks
    if missing > shutil.disk_usage(Path(opened.name).parent).free:  # the call below would take all that is left first
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if size:
        os.posix_fallocate(opened.fileno(), 0, size)
    os.truncate(opened.fileno(), size)
