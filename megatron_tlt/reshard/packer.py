"""Copies slices between the memory of weights and buckets, with checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_tlt.platform.device import rank
from megatron_tlt.reshard.buckets import Bucket, aligned
from megatron_tlt.reshard.checksum import CHECKSUM_WORDS, STACKED_BYTES, ChecksumVerifier, checksums
from megatron_tlt.reshard.interface import SpanViews
from megatron_tlt.reshard.plan import ReshardPlan, Transfer

TRAILER_BYTES = aligned(CHECKSUM_WORDS * 8)


class Packer:
    """Moves slices between memory and buckets, and records them.

    Slices are made once, at the first synchronization after the views of memory have changed.

    Args:
        wire: the dtype in which each tensor is sent.
        held, needed: this rank's spans on both sides with views of their memory; ``Transfer`` names them by slot.
    """

    def __init__(self, plan: ReshardPlan, wire: Mapping[str, torch.dtype], held: SpanViews, needed: SpanViews) -> None:
        self._plan = plan
        self._wire = wire
        self._held = held
        self._needed = needed
        self._sources: dict[Transfer, torch.Tensor] = {}
        self._targets: dict[Transfer, torch.Tensor] = {}
        self.begin(verify=False)

    def shows(self, held: SpanViews, needed: SpanViews) -> bool:
        """Whether these are the views that it has."""
        return held is self._held and needed is self._needed

    def begin(self, *, verify: bool) -> None:
        """Starts the record of a synchronization; ``verify``: with checksums."""
        self._verify = verify
        self._sent_sums: dict[tuple[int, int, int], torch.Tensor] = {}
        self.proof = ChecksumVerifier(self._plan, rank(), [span for span, _ in self._needed])

    def _source(self, transfer: Transfer) -> torch.Tensor:
        return self._slice(self._sources, self._held, transfer.source_slot, transfer)

    def _target(self, transfer: Transfer) -> torch.Tensor:
        return self._slice(self._targets, self._needed, transfer.target_slot, transfer)

    def _slice(
        self, known: dict[Transfer, torch.Tensor], views: SpanViews, slot: int, transfer: Transfer
    ) -> torch.Tensor:
        found = known.get(transfer)
        if found is None:
            span, view = views[slot]
            dim = self._plan.forms[transfer.tensor].dim
            found = known[transfer] = view.narrow(dim, transfer.start - span.start, transfer.length)
        return found

    def copy(self, transfers: Sequence[Transfer]) -> None:
        """Copies from the actor to the engine of this process, without a buffer."""
        sources, targets = [*map(self._source, transfers)], [*map(self._target, transfers)]
        copy_each(sources, targets)
        self.proof.written(transfers)
        if self._verify:
            self.proof.compare(transfers, self._sent(transfers, sources), self._found(transfers, targets))

    def outgoing(self, bucket: Bucket) -> list[torch.Tensor]:
        """The memory that is sent in place."""
        return [self._source(transfer) for transfer in bucket.in_place]

    def incoming(self, bucket: Bucket) -> list[torch.Tensor]:
        """The memory that is received in place."""
        return [self._target(transfer) for transfer in bucket.in_place]

    def pack(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Writes packed transfers and trailers into ``data``, (bytes)."""
        sources = [*map(self._source, bucket.transfers)]
        copy_each(sources[: len(bucket.packed)], self._places(bucket, data, sources))
        if self._verify and sources:
            self._trailers(bucket, data).copy_(torch.stack(self._sent(bucket.transfers, sources)))

    def unpack(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Reads them from ``data``; transfers in place have arrived."""
        targets = [*map(self._target, bucket.transfers)]
        copy_each(self._places(bucket, data, targets), targets[: len(bucket.packed)])
        self.proof.written(bucket.transfers)
        if self._verify and targets:
            sent = self._trailers(bucket, data).clone()  # the buffer is reused
            self.proof.compare(bucket.transfers, sent, self._found(bucket.transfers, targets))

    def _places(self, bucket: Bucket, data: torch.Tensor, slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of the packed transfers' bytes in the shapes of their slices."""
        packed = zip(bucket.packed.items(), slices, strict=False)  # transfers in place follow
        return [data[at].view(self._wire[transfer.tensor]).view(part.shape) for (transfer, at), part in packed]

    @staticmethod
    def _trailers(bucket: Bucket, data: torch.Tensor) -> torch.Tensor:
        """The checksums (transfers, 3) after the payload."""
        end = bucket.payload_bytes + len(bucket.transfers) * TRAILER_BYTES
        rows = data[bucket.payload_bytes : end].view(torch.int64).view(-1, TRAILER_BYTES // 8)
        return rows[:, :CHECKSUM_WORDS]

    def _sent(self, transfers: Sequence[Transfer], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The checksums of slices in the form in which they are sent; computed once for all receivers."""
        keys = [(transfer.source_slot, transfer.start, transfer.length) for transfer in transfers]
        new = {key: index for index, key in enumerate(keys) if key not in self._sent_sums}
        sums = self._found([transfers[index] for index in new.values()], [sources[index] for index in new.values()])
        self._sent_sums.update(zip(new, sums, strict=True))
        return [self._sent_sums[key] for key in keys]

    def _found(self, transfers: Sequence[Transfer], slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The checksums of slices in the form in which they are sent."""
        wire = (self._wire[transfer.tensor] for transfer in transfers)
        return checksums([part.to(dtype) for part, dtype in zip(slices, wire, strict=True)])


def copy_each(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies each tensor to its target; those of equal layouts by few kernels together.

    One pair of different layouts would make torch copy all of them one by one.
    """
    alike: dict[bool, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        both = alike.setdefault(source.is_contiguous() and target.is_contiguous(), ([], []))
        both[0].append(target)
        both[1].append(source)
    for pair in alike.values():
        torch._foreach_copy_(*pair)


def local_groups(transfers: Sequence[Transfer], bytes_of: Callable[[Transfer], int]) -> list[list[Transfer]]:
    """Consecutive transfers of up to ``STACKED_BYTES`` together, or one larger."""
    groups: list[list[Transfer]] = []
    room = 0
    for transfer in transfers:
        size = bytes_of(transfer)
        if not groups or size > room:
            groups.append([])
            room = STACKED_BYTES
        groups[-1].append(transfer)
        room -= size
    return groups
