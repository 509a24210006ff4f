"""Checksums of tensors, computed on their device, and the check by them that every slice arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.reshard.plan import ReshardPlan, Transfer
from megatron_tlt.reshard.spans import Span

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
CHECKSUM_WORDS = 3
STACKED_BYTES = 64 << 20
"""Maximum bytes of the copy for which ``checksums`` stacks small tensors."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums over the words of a tensor's bits: plain, weighted by row and weighted by column; (3), int64, modulo 2**64.

    Equal tensors of one shape have equal checksums on every device and in every memory layout. A flipped bit, a missing
    slice or a pair of swapped elements changes at least one of the sums (as in Adler-32). Costs two passes over the
    memory, and no copy if rows are contiguous.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    return _sums(rows[None])[0]


def checksums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ``checksum`` of each tensor.

    Small tensors of one shape and dtype, such as the experts of a layer, are stacked, so that a device launches a few
    kernels for up to ``STACKED_BYTES`` of them instead of a few for each.
    """
    groups: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape, tensor.dtype), []).append(index)
    found: dict[int, torch.Tensor] = {}
    for (shape, _), indices in groups.items():
        count = max(1, STACKED_BYTES // max(1, tensors[indices[0]].nbytes))
        for start in range(0, len(indices), count):
            some = indices[start : start + count]
            if len(some) == 1:
                found[some[0]] = checksum(tensors[some[0]])
                continue
            stacked = torch.stack([tensors[index].detach() for index in some])
            sums = _sums(stacked.view(len(some), -1, shape[-1] if shape else 1))
            found.update(zip(some, sums, strict=True))
    return [found[index] for index in range(len(tensors))]


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """The checksums of (tensors, rows, columns): (tensors, 3)."""
    words = _as_words(rows)
    by_row, by_column = words.sum(2, dtype=torch.int64), words.sum(1, dtype=torch.int64)
    weighted = [(sums * _weights(sums)).sum(1) for sums in (by_row, by_column)]
    return torch.stack([by_row.sum(1), *weighted], dim=1)


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """(tensors, rows, columns) as the widest integers that a row consists of, for any memory layout."""
    size = rows.element_size()
    width, word = next((width, word) for width, word in _WORDS if rows.shape[2] * size % width == 0)
    ratio = max(1, width // size)
    fits = rows.stride(2) == 1 and not any(at % ratio for at in (*rows.stride()[:2], rows.storage_offset()))
    return (rows if fits else rows.contiguous()).view(word)


def _weights(sums: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, sums.shape[1] + 1, dtype=torch.int64, device=sums.device)


class ChecksumVerifier:
    """Collects the slices that this rank received; nothing is read from the device before ``check``."""

    def __init__(self, plan: ReshardPlan, rank: int, needed: Sequence[Span]) -> None:
        self._layouts = f"{plan.actor} to engines {plan.engines}"
        self._rank = rank
        self._needed = needed
        self._entries: Counter[int] = Counter()
        self._transfers: list[Transfer] = []
        self._sent: list[torch.Tensor] = []
        self._found: list[torch.Tensor] = []

    def written(self, transfers: Iterable[Transfer]) -> None:
        """Records that ``transfers`` are in the engine."""
        for transfer in transfers:
            self._entries[transfer.target_slot] += transfer.length

    def compare(
        self, transfers: Sequence[Transfer], sent: Iterable[torch.Tensor], found: Iterable[torch.Tensor]
    ) -> None:
        """Adds checksums to compare, (3) for each of ``transfers`` on both sides."""
        self._transfers += transfers
        self._sent += sent
        self._found += found

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
        if not self._transfers:
            return 0
        pairs = torch.stack([torch.stack(self._sent), torch.stack(self._found)], dim=1).cpu()
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
