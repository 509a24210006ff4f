"""Checksums of tensors, computed on their device, and the check by them that every slice arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.reshard.plan import ReshardPlan, Transfer
from megatron_tlt.reshard.spans import Span

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


class ChecksumVerifier:
    """Collects the slices that this rank received; nothing is read from the device before ``check``."""

    def __init__(self, plan: ReshardPlan, rank: int, needed: Sequence[Span]) -> None:
        self._layouts = f"{plan.actor} to engines {plan.engines}"
        self._rank = rank
        self._needed = needed
        self._entries: Counter[int] = Counter()
        self._transfers: list[Transfer] = []
        self._sums: list[torch.Tensor] = []

    def written(self, transfer: Transfer) -> None:
        """Records that ``transfer`` is in the engine."""
        self._entries[transfer.target_slot] += transfer.length

    def compare(self, transfer: Transfer, sent: torch.Tensor, found: torch.Tensor) -> None:
        """Adds two checksums to compare, (3) each."""
        self._transfers.append(transfer)
        self._sums.append(torch.stack([sent, found]))

    def check(self) -> int:
        """Returns the number of verified tensors in this rank's engine; 0 if nothing was compared.

        Raises:
            RunError: entries of a tensor were not written, or differ from those sent; names tensor, ranks and layouts.
        """
        for slot, span in enumerate(self._needed):
            if self._entries[slot] != span.length:
                raise RunError(
                    f"rank {self._rank}: {self._entries[slot]} of {span.length} entries of {span.tensor} were written "
                    f"({self._layouts}); the engine holds stale weights"
                )
        if not self._sums:
            return 0
        pairs = torch.stack(self._sums).cpu()
        wrong = (pairs[:, 0] != pairs[:, 1]).any(dim=1)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            transfer = self._transfers[at]
            sent, found = (tuple(row) for row in pairs[at].tolist())
            entries = f"entries {transfer.start} to {transfer.start + transfer.length}"
            raise RunError(
                f"rank {self._rank}: {transfer.tensor}, {entries}, has checksum {found} in the engine, rank "
                f"{transfer.source} sent {sent} ({self._layouts}): the engine holds stale or damaged weights"
            )
        return len({span.tensor for span in self._needed})
