"""Boxes of a flat range cover it once, in order, and are as few as they can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.checkpoint.boxes import Box, boxes_of_range


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start, end = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, end


@given(ranges())
def test_boxes_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    covered: list[int] = []
    boxes = list(boxes_of_range(shape, start, end))
    for box in boxes:
        block = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert block.shape == box.sizes
        assert block.flat[0] == box.start
        covered += block.flatten().tolist()
    assert covered == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_range_of_a_matrix_is_a_row_s_rest_whole_rows_and_a_row_s_beginning() -> None:
    assert list(boxes_of_range((4, 10), 7, 33)) == [
        Box((0, 7), (1, 3), 7),
        Box((1, 0), (2, 10), 10),
        Box((3, 0), (1, 3), 30),
    ]


def test_a_range_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="elements 3 to 7 are not within"):
        list(boxes_of_range((2, 3), 3, 7))
