"""Copies slices between the memory of weights and buckets, with checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_tlt.platform.device import rank
from megatron_tlt.reshard.buckets import Bucket, aligned
from megatron_tlt.reshard.checksum import CHECKSUM_WORDS, ChecksumVerifier, checksum
from megatron_tlt.reshard.plan import ReshardPlan, Transfer
from megatron_tlt.reshard.spans import Span

_CHECKSUM_BYTES = CHECKSUM_WORDS * 8
TRAILER_BYTES = aligned(_CHECKSUM_BYTES)
SpanViews = Sequence[tuple[Span, torch.Tensor]]


class Packer:
    """Moves slices between memory and buckets, and records them.

    Args:
        wire: the dtype in which each tensor is sent.
        held, needed: this rank's spans on both sides with views of their memory; ``Transfer`` names them by slot.
    """

    def __init__(
        self, plan: ReshardPlan, wire: Mapping[str, torch.dtype], held: SpanViews, needed: SpanViews, verify: bool
    ) -> None:
        self._forms = plan.forms
        self._wire = wire
        self._held = held
        self._needed = needed
        self._verify = verify
        self._sent_sums: dict[tuple[int, int, int], torch.Tensor] = {}
        self.proof = ChecksumVerifier(plan, rank(), [span for span, _ in needed])

    def _source(self, transfer: Transfer) -> torch.Tensor:
        return self._slice(self._held[transfer.source_slot], transfer)

    def _target(self, transfer: Transfer) -> torch.Tensor:
        return self._slice(self._needed[transfer.target_slot], transfer)

    def _slice(self, slot: tuple[Span, torch.Tensor], transfer: Transfer) -> torch.Tensor:
        span, view = slot
        return view.narrow(self._forms[transfer.tensor].dim, transfer.start - span.start, transfer.length)

    def copy(self, transfer: Transfer) -> None:
        """Copies from the actor to the engine of this process, without a buffer."""
        source, target = self._source(transfer), self._target(transfer)
        target.copy_(source)
        self.proof.written(transfer)
        if self._verify:
            self.proof.compare(transfer, self._sent(transfer, source), self._found(transfer, target))

    def outgoing(self, bucket: Bucket) -> list[torch.Tensor]:
        """The memory that is sent in place."""
        return [self._source(transfer) for transfer in bucket.in_place]

    def incoming(self, bucket: Bucket) -> list[torch.Tensor]:
        """The memory that is received in place."""
        return [self._target(transfer) for transfer in bucket.in_place]

    def pack(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Writes packed transfers and trailers into ``data``, (bytes)."""
        for transfer, place in bucket.packed.items():
            source = self._source(transfer)
            self._seen(data[place], transfer, source.shape).copy_(source)
        if self._verify:
            for number, transfer in enumerate(bucket.transfers):
                self._trailer(bucket, data, number).copy_(self._sent(transfer, self._source(transfer)))

    def unpack(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Reads them from ``data``; transfers in place have arrived."""
        for transfer, place in bucket.packed.items():
            target = self._target(transfer)
            target.copy_(self._seen(data[place], transfer, target.shape))
        for number, transfer in enumerate(bucket.transfers):
            self.proof.written(transfer)
            if self._verify:
                sent = self._trailer(bucket, data, number).clone()  # the buffer is reused
                self.proof.compare(transfer, sent, self._found(transfer, self._target(transfer)))

    def _seen(self, data: torch.Tensor, transfer: Transfer, shape: torch.Size) -> torch.Tensor:
        """Views a transfer's bytes as its slice."""
        return data.view(self._wire[transfer.tensor]).view(shape)

    @staticmethod
    def _trailer(bucket: Bucket, data: torch.Tensor, number: int) -> torch.Tensor:
        at = bucket.payload_bytes + number * TRAILER_BYTES
        return data[at : at + _CHECKSUM_BYTES].view(torch.int64)

    def _sent(self, transfer: Transfer, source: torch.Tensor) -> torch.Tensor:
        """The checksum of a slice in the form in which it is sent; computed once for all receivers."""
        key = (transfer.source_slot, transfer.start, transfer.length)
        if key not in self._sent_sums:
            self._sent_sums[key] = checksum(source.to(self._wire[transfer.tensor]))
        return self._sent_sums[key]

    def _found(self, transfer: Transfer, target: torch.Tensor) -> torch.Tensor:
        """The checksum of a slice in the engine, in the form in which it was sent."""
        return checksum(target.to(self._wire[transfer.tensor]))
