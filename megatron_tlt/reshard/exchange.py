"""Rounds of buckets over torch.distributed: one round is packed while the one before travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
import torch.distributed as dist

from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import rank
from megatron_tlt.reshard.buckets import Bucket, Round, largest_buckets

Fill = Callable[[Bucket, torch.Tensor], None]
"""Packs a bucket into its bytes, or unpacks it from them."""

_Carved = list[tuple[Bucket, torch.Tensor]]
_Posted = list[tuple[dist.Work, list[Bucket]]]


class BucketExchange:
    """Sends and receives a rank's rounds through four buffers, each as large as its largest round.

    Args:
        rounds: this rank's, from ``make_rounds``.
        trailer_bytes: bytes behind each bucket's payload for each of its fragments.
        device: where the weights are.
    """

    def __init__(self, rounds: Sequence[Round], trailer_bytes: int, device: torch.device) -> None:
        self._rounds = rounds
        self._trailer = trailer_bytes
        self._device = device

    def run(self, pack: Fill, unpack: Fill, meanwhile: Sequence[Callable[[], None]]) -> None:
        """Exchanges all rounds; calls ``meanwhile`` one by one while buckets travel. Buffers live as long as this call.

        Raises:
            RunError: a rank that buckets go to or come from is gone; names it and the tensors.
        """
        sends, receives = largest_buckets(self._rounds, self._trailer)
        slots = [(self._buffer(sends), self._buffer(receives)) for _ in self._rounds[:2]]
        other_work, share = iter(meanwhile), -(-len(meanwhile) // max(1, len(self._rounds)))
        before: Callable[[], None] = _nothing
        for number, one in enumerate(self._rounds):
            send_buffer, receive_buffer = slots[number % 2]
            outgoing = self._carve(send_buffer, one.sends.values())
            incoming = self._carve(receive_buffer, one.receives.values())
            for bucket, data in outgoing:
                pack(bucket, data)
            arrival = _Arrival(self.post(outgoing, incoming), incoming, unpack)
            for call in islice(other_work, share):
                call()
            before()
            before = arrival
        before()
        for call in other_work:
            call()

    def post(self, outgoing: _Carved, incoming: _Carved) -> _Posted:
        """Starts all transfers of a round; returns what to wait for, with the buckets that each is about."""
        sends = [dist.P2POp(dist.isend, data, bucket.peer) for bucket, data in outgoing]
        receives = [dist.P2POp(dist.irecv, data, bucket.peer) for bucket, data in incoming]
        buckets = [bucket for bucket, _ in (*outgoing, *incoming)]
        with naming_peers(buckets):
            works = dist.batch_isend_irecv([*sends, *receives])
        if len(works) == len(buckets):
            return [(work, [bucket]) for work, bucket in zip(works, buckets, strict=True)]
        return [(work, buckets) for work in works]  # NCCL makes one of them

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _carve(self, buffer: torch.Tensor, buckets: Iterable[Bucket]) -> _Carved:
        """Each bucket's part of a buffer, (bytes)."""
        carved, at = [], 0
        for bucket in buckets:
            size = bucket.total_bytes(self._trailer)
            carved.append((bucket, buffer[at : at + size]))
            at += size
        return carved


class _Arrival:
    """Waits for a round and unpacks it."""

    def __init__(self, posted: _Posted, incoming: _Carved, unpack: Fill) -> None:
        self._posted = posted
        self._incoming = incoming
        self._unpack = unpack

    def __call__(self) -> None:
        for work, buckets in self._posted:
            with naming_peers(buckets):
                work.wait()
        for bucket, data in self._incoming:
            self._unpack(bucket, data)


def _nothing() -> None:
    """Before the first round."""


@contextmanager
def naming_peers(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Turns what a broken connection raises into an error that says who is gone and what was under way."""
    try:
        yield
    except RuntimeError as error:
        peers = sorted({bucket.peer for bucket in buckets})
        tensors = list(dict.fromkeys(fragment.transfer.tensor for bucket in buckets for fragment in bucket.fragments))
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        raise RunError(
            f"rank {rank()}: the transfer of {tensors[0]}{more} with rank {', '.join(map(str, peers))} broke off: "
            f"{str(error).splitlines()[0]}; the engine holds old and new weights mixed"
        ) from error
