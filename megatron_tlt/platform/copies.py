"""Copies from host to device for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16
Arrays = Sequence[np.ndarray[Any, Any]]


def copy_to_device(arrays: Arrays, device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device: one copy from pinned memory, in the order of the current stream.

    On a CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # torch does not reuse this memory before the copy from it has ended
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Arrays, pinned: bool) -> torch.Tensor:
    """The arrays' bytes one after the other, each aligned: (bytes)."""
    packed = torch.empty(_ends(arrays)[-1], dtype=torch.uint8, pin_memory=pinned)
    for view, array in zip(unpack(packed, arrays), arrays, strict=True):
        view.copy_(torch.from_numpy(array))
    return packed


def unpack(packed: torch.Tensor, arrays: Arrays) -> list[torch.Tensor]:
    """Views of ``packed`` with the arrays' shapes and types."""
    starts = [0, *_ends(arrays)]
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _ends(arrays: Arrays) -> list[int]:
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return [int(end) for end in np.cumsum(sizes)]
