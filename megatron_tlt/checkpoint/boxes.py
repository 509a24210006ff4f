"""Splits a range of a flattened tensor into boxes: a sharded optimizer's elements in a form that reshards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A block of a tensor, by its first index and extent per axis, that is contiguous in the tensor's flattened form.

    ``start`` is the index of its first element there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """The largest boxes, in order, that cover elements ``[start, end)`` of a row-major tensor of ``shape``.

    At most ``2 * len(shape) - 1`` boxes: for a matrix the end of a row, whole rows, and the start of a row. Raises
    ValueError if the range is not within the tensor.
    """
    if not 0 <= start <= end <= math.prod(shape):
        raise ValueError(f"elements {start} to {end} are not within a tensor of shape {shape}")
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while start < end:
        axes = range(len(shape))
        axis = next((a for a in axes if start % strides[a] == 0 and start + strides[a] <= end), None)
        if axis is None:  # a tensor without axes has one element
            yield Box((), (), start)
            return
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        count = min((end - start) // strides[axis], shape[axis] - offsets[axis])
        yield Box(offsets, (*itertools.repeat(1, axis), count, *shape[axis + 1 :]), start)
        start += count * strides[axis]
