"""Arrays packed for one copy come out as they went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_tlt.platform.copies import copy_to_device, pack, unpack

ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(5, dtype=np.int32),
    np.linspace(0.0, 1.0, 6).reshape(2, 3),
    np.array([], dtype=np.int64),
    np.array([True, False, True]),
    np.arange(3, dtype=np.float32)[:, None],
]


@pytest.mark.parametrize("packed", [True, False])
def test_arrays_keep_values_shapes_and_types(packed: bool) -> None:
    # a copy to a GPU packs and unpacks; a CPU takes the arrays as they are
    tensors = unpack(pack(ARRAYS, pinned=False), ARRAYS) if packed else copy_to_device(ARRAYS, torch.device("cpu"))
    assert len(tensors) == len(ARRAYS)
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype


def test_a_device_gets_one_copy() -> None:
    tensors = copy_to_device(ARRAYS, torch.device("meta"))
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1
    assert [tensor.shape for tensor in tensors] == [array.shape for array in ARRAYS]
