"""Verifies that every slice arrived: checksums at its source and destination, and a count of entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.reshard.plan import ReshardPlan, Transfer
from megatron_tlt.reshard.spans import Span


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
