"""Limits of the operating system, for a while."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def _soft_limit(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def files_of_at_most(nbytes: int) -> contextlib.AbstractContextManager[None]:
    """A write beyond so many bytes of a file fails with EFBIG, much as on a disk that fills up; needs no rights."""
    return _soft_limit(resource.RLIMIT_FSIZE, nbytes)


def open_files_limit(count: int) -> contextlib.AbstractContextManager[None]:
    """Descriptors from ``count`` on cannot be opened; those that are open stay."""
    return _soft_limit(resource.RLIMIT_NOFILE, count)
