"""Checksums of tensors, computed where the tensor lives."""

from __future__ import annotations

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PERIOD = 65521


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over the tensor's bits, one of them weighted by position (as in Adler-32), modulo 2**64.

    Equal tensors have equal checksums on every device and in every memory layout; a flipped bit, a swapped pair of
    elements or a missing slice changes at least one of the two.
    """
    bits = tensor.detach().contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()]).reshape(-1).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64).remainder_(_PERIOD).add_(1)
    return int(bits.sum()), int((bits * weights).sum())
