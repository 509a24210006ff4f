"""Exchanges rounds of buckets over torch.distributed: one round is packed while the previous one is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import rank
from megatron_tlt.reshard.buckets import Bucket, ExchangeRound, largest_buckets
from megatron_tlt.reshard.packer import Packer


class Message(NamedTuple):
    """A bucket with all memory that is sent or received: staged bytes, if any, then transfers in place."""

    bucket: Bucket
    staged: torch.Tensor
    in_place: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return ([self.staged] if self.staged.numel() else []) + self.in_place


_Posted = list[tuple[dist.Work, list[Bucket]]]


class BucketExchange:
    """Sends and receives a rank's rounds with four buffers, each as large as its largest round.

    After each bucket's payload follow ``trailer_bytes`` for each of its transfers.
    """

    def __init__(self, rounds: Sequence[ExchangeRound], trailer_bytes: int, device: torch.device) -> None:
        self._rounds = rounds
        self._trailer = trailer_bytes
        self._device = device

    def run(self, packer: Packer, meanwhile: Sequence[Callable[[], None]]) -> None:
        """Exchanges all rounds, and calls ``meanwhile`` one by one during transfers. Buffers are freed at the end.

        Raises:
            RunError: a peer rank of a bucket is gone; names it and the tensors.
        """
        sends, receives = largest_buckets(self._rounds, self._trailer)
        slots = [(self._buffer(sends), self._buffer(receives)) for _ in self._rounds[:2]]
        other_work, share = iter(meanwhile), -(-len(meanwhile) // max(1, len(self._rounds)))
        arrive: Callable[[], None] | None = None  # of the previous round
        for number, one in enumerate(self._rounds):
            send_buffer, receive_buffer = slots[number % 2]
            outgoing = self._messages(send_buffer, one.sends.values(), packer.outgoing)
            incoming = self._messages(receive_buffer, one.receives.values(), packer.incoming)
            for message in outgoing:
                packer.pack(message.bucket, message.staged)
            next_arrive = partial(_arrive, self.post(outgoing, incoming), incoming, packer)
            for call in islice(other_work, share):
                call()
            if arrive is not None:
                arrive()
            arrive = next_arrive
        if arrive is not None:
            arrive()
        for call in other_work:
            call()

    def post(self, outgoing: list[Message], incoming: list[Message]) -> _Posted:
        """Starts all transfers of a round; returns the pending works, each with its buckets."""
        operations, buckets = [], []
        for start, messages in ((dist.isend, outgoing), (dist.irecv, incoming)):
            for message in messages:
                operations += [dist.P2POp(start, tensor, message.bucket.peer) for tensor in message.tensors]
                buckets += [message.bucket] * len(message.tensors)
        with _naming_peers(buckets):
            works = dist.batch_isend_irecv(operations)
        if len(works) == len(buckets):
            return [(work, [bucket]) for work, bucket in zip(works, buckets, strict=True)]
        return [(work, buckets) for work in works]  # NCCL returns a single work

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _messages(
        self, buffer: torch.Tensor, buckets: Iterable[Bucket], in_place: Callable[[Bucket], list[torch.Tensor]]
    ) -> list[Message]:
        """Each bucket with its part of a buffer."""
        messages, at = [], 0
        for bucket in buckets:
            size = bucket.staged_bytes(self._trailer)
            messages.append(Message(bucket, buffer[at : at + size], in_place(bucket)))
            at += size
        return messages


def _arrive(posted: _Posted, incoming: list[Message], packer: Packer) -> None:
    """Waits for a round and unpacks it."""
    for work, buckets in posted:
        with _naming_peers(buckets):
            work.wait()
    for message in incoming:
        packer.unpack(message.bucket, message.staged)


@contextmanager
def _naming_peers(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Converts the error of a broken connection to one that names the lost ranks and the tensors in transfer."""
    try:
        yield
    except RuntimeError as error:
        peers = sorted({bucket.peer for bucket in buckets})
        tensors = list(dict.fromkeys(transfer.tensor for bucket in buckets for transfer in bucket.transfers))
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        raise RunError(
            f"rank {rank()}: the transfer of {tensors[0]}{more} with rank {', '.join(map(str, peers))} broke off: "
            f"{str(error).splitlines()[0]}; the engine holds old and new weights mixed"
        ) from error
