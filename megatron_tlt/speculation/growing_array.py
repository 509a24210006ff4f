"""Arrays that grow in place and give their memory back."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAPPED_FROM = 1 << 16
"""Bytes from which an array is a mapping of its own: malloc keeps arrays of some MiB that were freed, in pieces."""


class GrowingArray:
    """A one-dimensional array, zero where nothing was written. ``array`` is its present form; no other may be kept."""

    def __init__(self, length: int, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._map: mmap.mmap | None = None
        self.array: NDArray[Any] = np.zeros(0, self._dtype)
        self.grow(length)

    def grow(self, length: int) -> None:
        """Lengthens it; a large array is remapped, so it is never there twice."""
        nbytes = length * self._dtype.itemsize
        if nbytes < MAPPED_FROM:
            self.array.resize(length, refcheck=False)
        elif self._map is None:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            before, self.array = self.array, np.frombuffer(self._map, self._dtype, length)
            self.array[: len(before)] = before
        else:
            self._remap(self._map, length, nbytes)

    def _remap(self, mapped: mmap.mmap, length: int, nbytes: int) -> None:
        before = len(self.array)
        self.array = np.zeros(0, self._dtype)  # a mapping that an array looks at cannot be moved
        try:
            try:
                mapped.resize(nbytes)
            except BufferError:
                # somebody else still looks at it, as an exception that is not collected yet: it keeps the old memory
                self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, SystemError, ValueError):
            self.array = np.frombuffer(mapped, self._dtype, before)
            raise
        assert self._map is not None
        self.array = np.frombuffer(self._map, self._dtype, length)
        if self._map is not mapped:
            self.array[:before] = np.frombuffer(mapped, self._dtype, before)
