"""Checksums of tensors, computed on the tensor's device."""

from __future__ import annotations

import torch

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
CHECKSUM_WORDS = 3


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums over the words of a tensor's bits: plain, weighted by row and weighted by column; (3), int64, modulo 2**64.

    Equal tensors of one shape have equal checksums on every device and in every memory layout. A flipped bit, a missing
    slice or a pair of swapped elements changes at least one of the sums (as in Adler-32). Costs two passes over the
    memory, and no copy if rows are contiguous.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    words = _as_words(rows)
    by_row, by_column = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
    return torch.stack([by_row.sum(), (by_row * _weights(by_row)).sum(), (by_column * _weights(by_column)).sum()])


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """Two dimensions of the widest integers that a row consists of, for any memory layout."""
    size = rows.element_size()
    width, word = next((width, word) for width, word in _WORDS if rows.shape[1] * size % width == 0)
    ratio = max(1, width // size)
    fits = rows.stride(1) == 1 and rows.stride(0) % ratio == 0 and rows.storage_offset() % ratio == 0
    return (rows if fits else rows.contiguous()).view(word)


def _weights(sums: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, sums.numel() + 1, dtype=torch.int64, device=sums.device)
