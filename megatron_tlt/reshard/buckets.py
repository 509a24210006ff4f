"""Splits the transfers of a plan and packs them into buckets of bounded size, in rounds; pure.

In a round a rank sends at most one bucket to each other rank and receives at most one from each. Two rounds are in
flight at once (one is packed while the other travels), so a rank's buckets of one round and direction may use a quarter
of its staging memory. Large transfers that are contiguous on both sides are not packed: they are sent from parameter to
parameter, in the round of their bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from megatron_tlt.errors import ConfigError
from megatron_tlt.reshard.plan import ReshardPlan, Transfer

# Packed transfers start at multiples of this many bytes, so that they can be viewed as any dtype.
ALIGNMENT = 16
# Smaller transfers are cheaper to pack than to send separately.
IN_PLACE_BYTES = 256 * 1024
_ROUNDS_IN_FLIGHT = 2
_DIRECTIONS = 2


@dataclass
class Bucket:
    """The transfers from one rank to another in a round: packed ones, with their bytes in it, and ones sent in place.

    After the packed ones follows a trailer for each transfer, in the order of ``transfers``.
    """

    peer: int
    packed: dict[Transfer, slice] = field(default_factory=dict)
    in_place: list[Transfer] = field(default_factory=list)
    payload_bytes: int = 0
    in_place_bytes: int = 0

    def add(self, transfer: Transfer, size: int, in_place: bool) -> None:
        if in_place:
            self.in_place.append(transfer)
            self.in_place_bytes += size
        else:
            self.packed[transfer] = slice(self.payload_bytes, self.payload_bytes + size)
            self.payload_bytes += aligned(size)

    @property
    def transfers(self) -> list[Transfer]:
        return [*self.packed, *self.in_place]

    def staged_bytes(self, trailer_bytes: int) -> int:
        """Bytes of the packed transfers, with ``trailer_bytes`` for each of all transfers."""
        return self.payload_bytes + trailer_bytes * (len(self.packed) + len(self.in_place))

    def wire_bytes(self, trailer_bytes: int) -> int:
        """Total bytes that are sent."""
        return self.staged_bytes(trailer_bytes) + self.in_place_bytes


@dataclass
class ExchangeRound:
    """One rank's buckets of a round, by peer."""

    sends: dict[int, Bucket] = field(default_factory=dict)
    receives: dict[int, Bucket] = field(default_factory=dict)


def aligned(size: int) -> int:
    """``size`` rounded up to the next possible start of a packed transfer."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def make_rounds(
    plan: ReshardPlan, rank: int, staging_bytes: int, trailer_bytes: int, contiguous: Collection[str] = ()
) -> list[ExchangeRound]:
    """The rounds of one rank, in order; all ranks compute theirs from the same plan.

    Senders take turns, so that all links are busy from the first round to the last. Large transfers are split.

    Args:
        staging_bytes: limit for all buckets in flight on a rank.
        trailer_bytes: bytes sent with each transfer (its checksum), a multiple of ``ALIGNMENT``.
        contiguous: tensors whose slices are contiguous, and in the form in which they are sent, on every rank.

    Raises:
        ConfigError: a single entry of a tensor does not fit; names it and the size needed.
    """
    bound = staging_bytes // (_ROUNDS_IN_FLIGHT * _DIRECTIONS)
    used = tuple([_Fill(bound) for _ in range(plan.world)] for _ in range(_DIRECTIONS))
    rounds: dict[int, ExchangeRound] = defaultdict(ExchangeRound)
    for transfer in _in_turns(plan):
        send, receive = used[0][transfer.source], used[1][transfer.target]
        entry = plan.forms[transfer.tensor].entry_bytes
        least = aligned(entry) + trailer_bytes
        if least > bound:
            needed = least * _ROUNDS_IN_FLIGHT * _DIRECTIONS
            raise ConfigError(
                f"reshard.staging_mb: found {staging_bytes / 2**20:g}; allowed: at least {needed / 2**20:.3g}, which "
                f"one entry of {transfer.tensor} takes in flight"
            )
        at, left = transfer.start, transfer.length
        while left:
            number = _first_common(send, receive, least)
            room = min(send.room(number), receive.room(number)) - trailer_bytes
            length = min(left, room // ALIGNMENT * ALIGNMENT // entry)
            taken = aligned(length * entry) + trailer_bytes
            send.take(number, taken)
            receive.take(number, taken)
            if rank in (transfer.source, transfer.target):
                mine = rounds[number]
                sending = rank == transfer.source
                peer = transfer.target if sending else transfer.source
                bucket = (mine.sends if sending else mine.receives).setdefault(peer, Bucket(peer))
                size = length * entry
                in_place = size >= IN_PLACE_BYTES and transfer.tensor in contiguous
                bucket.add(transfer._replace(start=at, length=length), size, in_place)
            at, left = at + length, left - length
    return [rounds[number] for number in sorted(rounds)]


def local_transfers(plan: ReshardPlan, rank: int) -> list[Transfer]:
    """Transfers that a rank copies within its process."""
    return [transfer for transfer in plan.transfers if transfer.is_local and transfer.target == rank]


def largest_buckets(rounds: Iterable[ExchangeRound], trailer_bytes: int) -> tuple[int, int]:
    """Maximum bytes that a rank stages to send, and to receive, in a single round."""
    sends, receives = 0, 0
    for one in rounds:
        sends = max(sends, sum(bucket.staged_bytes(trailer_bytes) for bucket in one.sends.values()))
        receives = max(receives, sum(bucket.staged_bytes(trailer_bytes) for bucket in one.receives.values()))
    return sends, receives


class _Fill:
    """Bytes used in one rank's rounds in one direction."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._taken: list[int] = []
        self._first = 0

    def room(self, number: int) -> int:
        return self._bound - (self._taken[number] if number < len(self._taken) else 0)

    def first_with(self, size: int, after: int) -> int:
        """The first round from ``after`` on with that much room."""
        number = max(after, self._first)
        while self.room(number) < size:
            number += 1
        return number

    def take(self, number: int, size: int) -> None:
        self._taken.extend([0] * (number + 1 - len(self._taken)))
        self._taken[number] += size
        while self._first < len(self._taken) and self.room(self._first) < ALIGNMENT:
            self._first += 1


def _first_common(send: _Fill, receive: _Fill, size: int) -> int:
    number = 0
    while True:
        found = receive.first_with(size, send.first_with(size, number))
        if send.room(found) >= size:
            return found
        number = found


def _in_turns(plan: ReshardPlan) -> Iterable[Transfer]:
    """The transfers between ranks, always from the sender that has sent the smallest share of its bytes so far."""
    queues: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in plan.transfers:
        if not transfer.is_local:
            queues[transfer.source].append(transfer)
    totals = {source: sum(map(plan.bytes_of, queue)) for source, queue in queues.items()}
    turns = [(0.0, source, 0) for source in queues]
    heapify(turns)
    while turns:
        share, source, index = turns[0]
        transfer = queues[source][index]
        yield transfer
        if index + 1 < len(queues[source]):
            heapreplace(turns, (share + plan.bytes_of(transfer) / totals[source], source, index + 1))
        else:
            heappop(turns)


def staging_bytes_of(rounds: Sequence[ExchangeRound], trailer_bytes: int) -> int:
    """Bytes of the buffers for a rank's rounds: two per direction, as large as the largest round."""
    return _ROUNDS_IN_FLIGHT * sum(largest_buckets(rounds, trailer_bytes))
