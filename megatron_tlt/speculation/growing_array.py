"""Arrays that grow in place and release their memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAPPED_FROM = 1 << 16
"""Size above which an array has its own mapping: malloc fragments and keeps freed arrays of some MiB."""


class GrowingArray:
    """A one-dimensional array, initially zero. ``array`` is its current form; callers must keep no other reference."""

    def __init__(self, length: int, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._map: mmap.mmap | None = None
        self.array: NDArray[Any] = np.zeros(0, self._dtype)
        self.grow(length)

    def grow(self, length: int) -> None:
        """Lengthen the array; a large one is remapped, so that it never exists twice."""
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
        self.array = np.zeros(0, self._dtype)  # a mapping that an array refers to cannot be resized
        try:
            try:
                mapped.resize(nbytes)
            except BufferError:
                # another reference exists, for example in an uncollected exception; it keeps the old memory
                self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, SystemError, ValueError):
            self.array = np.frombuffer(mapped, self._dtype, before)
            raise
        assert self._map is not None
        self.array = np.frombuffer(self._map, self._dtype, length)
        if self._map is not mapped:
            self.array[:before] = np.frombuffer(mapped, self._dtype, before)
