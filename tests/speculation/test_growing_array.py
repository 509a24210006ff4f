"""Arrays that grow in place."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_tlt.speculation.growing_array import MAPPED_FROM, GrowingArray

LENGTH = MAPPED_FROM // 4  # of int32, in a mapping of its own


@pytest.mark.parametrize("dtype", [np.int32, np.dtype([("a", "f8"), ("b", "i4")])])
def test_written_values_stay_and_the_rest_is_zero(dtype: np.dtype) -> None:
    growing, written, before = GrowingArray(3, dtype), 0, b""
    rng = np.random.default_rng(0)
    for length in (3, 50, MAPPED_FROM // 16, MAPPED_FROM, MAPPED_FROM + 1, 9 * MAPPED_FROM):
        growing.grow(length)
        assert growing.array.shape == (length,) and growing.array.dtype == dtype
        assert not growing.array[written:].view(np.uint8).any()
        fresh = rng.integers(0, 255, (length - written) * growing.array.itemsize, dtype=np.uint8)
        growing.array[written:].view(np.uint8)[:] = fresh
        before += fresh.tobytes()
        assert growing.array.tobytes() == before
        written = length


def test_memory_is_returned_to_the_system() -> None:
    process = psutil.Process()
    begin = process.memory_info().rss
    arrays = [GrowingArray(1 << 18, np.int32) for _ in range(64)]
    for growing in arrays:
        growing.array[:] = 1
    assert process.memory_info().rss - begin > 60 << 20
    del arrays[1::2], growing
    gc.collect()
    assert process.memory_info().rss - begin < 40 << 20, "half of it is gone, though the rest lies between"


def test_it_grows_while_a_view_exists() -> None:
    """An exception's frames may hold such a view; growing must not loop forever."""
    array = GrowingArray(LENGTH, np.int32)
    array.array[:] = 7
    kept = array.array
    for length in (2 * LENGTH, 3 * LENGTH):
        array.grow(length)
        assert len(array.array) == length and (array.array[:LENGTH] == 7).all() and not array.array[LENGTH:].any()
    array.array[0] = 1
    assert (kept == 7).all()


def test_a_failed_allocation_leaves_it_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(mmap.mmap):
        def resize(self, _: int) -> Any:
            raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", Full)
    array = GrowingArray(LENGTH, np.int32)
    array.array[:] = 7
    with pytest.raises(OSError, match="no memory"):
        array.grow(2 * LENGTH)
    assert len(array.array) == LENGTH and (array.array == 7).all()
