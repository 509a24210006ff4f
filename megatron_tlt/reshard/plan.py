"""Plans which slice of which tensor goes from which actor rank to which engine rank; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.files import atomic_write_bytes
from megatron_tlt.reshard.spans import ShardMap, Span, TensorForm


class Transfer(NamedTuple):
    """Entries ``start .. start + length`` of a tensor, from a span that ``source`` holds to one that ``target`` needs.

    ``source_slot`` and ``target_slot`` are the spans' positions in their ranks' lists. A transfer with equal source and
    target is a copy within a process.
    """

    tensor: str
    start: int
    length: int
    source: int
    source_slot: int
    target: int
    target_slot: int

    @property
    def is_local(self) -> bool:
        return self.source == self.target


class _Owner(NamedTuple):
    rank: int
    slot: int
    span: Span


@dataclass(frozen=True)
class ReshardPlan:
    """Every transfer that fills the engines, in the order of the model's tensors; the same on every rank.

    ``nodes[rank]`` is the node of a rank; ``lower_bound`` is the bytes that ranks need and do not hold themselves.
    """

    forms: dict[str, TensorForm]
    actor: str
    engines: str
    nodes: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    lower_bound: int

    @property
    def world(self) -> int:
        return len(self.nodes)

    def bytes_of(self, transfer: Transfer) -> int:
        return transfer.length * self.forms[transfer.tensor].entry_bytes

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes from each rank to each other rank that it sends to."""
        links: dict[tuple[int, int], int] = defaultdict(int)
        for transfer in self.transfers:
            if not transfer.is_local:
                links[transfer.source, transfer.target] += self.bytes_of(transfer)
        return dict(links)

    @cached_property
    def local_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank copies within its process."""
        return self._by_rank((t.target, self.bytes_of(t)) for t in self.transfers if t.is_local)

    def sent_bytes(self, between_nodes: bool) -> tuple[int, ...]:
        """Bytes that each rank sends to ranks of its own node, or of other nodes."""
        return self._by_rank((a, n) for (a, b), n in self.link_bytes.items() if self._crosses(a, b) == between_nodes)

    def received_bytes(self, between_nodes: bool) -> tuple[int, ...]:
        """Bytes that each rank receives from ranks of its own node, or of other nodes."""
        return self._by_rank((b, n) for (a, b), n in self.link_bytes.items() if self._crosses(a, b) == between_nodes)

    @property
    def moved_bytes(self) -> int:
        """Total bytes over all links."""
        return sum(self.link_bytes.values())

    def _crosses(self, a: int, b: int) -> bool:
        return self.nodes[a] != self.nodes[b]

    def _by_rank(self, amounts: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        totals = [0] * self.world
        for rank, amount in amounts:
            totals[rank] += amount
        return tuple(totals)

    def write(self, path: Path | str) -> None:
        """Writes the plan as JSON, atomically; raises RunError if the disk is full."""
        atomic_write_bytes(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path | str) -> ReshardPlan:
        """Reads a file of ``write``; raises ConfigError if there is none, or it contains no plan."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: not a plan of a resharding: {error}") from error


def make_plan(forms: Mapping[str, TensorForm], actor: ShardMap, engines: ShardMap, nodes: Sequence[int]) -> ReshardPlan:
    """Plans one transfer of every entry that an engine rank needs, from a rank that holds it.

    Prefers a rank's own entries, then a rank of its node, then one of another node. Among equally near ranks it takes
    the one with the least to send so far over that kind of link. The result depends only on the arguments.

    Raises:
        RunError: no rank holds what an engine rank needs, a tensor is unknown, or a span exceeds its tensor; names
            tensor, rank and both layouts.
    """
    layouts = f"{actor.layout} to engines {engines.layout}"
    owners, needs = _by_tensor(actor, forms, layouts), _by_tensor(engines, forms, layouts)
    picker = _SourcePicker(nodes)
    transfers: list[Transfer] = []
    for tensor, form in forms.items():
        held = _Intervals(owners[tensor])
        for need in needs[tensor]:
            for start, length, holders in held.cover(need, layouts):
                owner = picker.pick(holders, need.rank, length * form.entry_bytes)
                transfers.append(Transfer(tensor, start, length, owner.rank, owner.slot, need.rank, need.slot))
    return ReshardPlan(dict(forms), actor.layout, engines.layout, tuple(nodes), tuple(transfers), picker.lower_bound)


def _by_tensor(side: ShardMap, forms: Mapping[str, TensorForm], layouts: str) -> dict[str, list[_Owner]]:
    found: dict[str, list[_Owner]] = defaultdict(list)
    for rank, spans in enumerate(side.spans):
        for slot, span in enumerate(spans):
            form = forms.get(span.tensor)
            if form is None:
                raise RunError(f"{span.tensor} of rank {rank} is no tensor of the model ({layouts})")
            if not 0 <= span.start <= span.end <= form.length:
                entries = f"entries {span.start} to {span.end} of its {form.length}"
                raise RunError(f"{span.tensor} of rank {rank}: {entries} ({layouts})")
            if span.length:
                found[span.tensor].append(_Owner(rank, slot, span))
    return found


class _Intervals:
    """The ranks that hold each entry of one tensor."""

    def __init__(self, owners: list[_Owner]) -> None:
        self._bounds = sorted({bound for owner in owners for bound in (owner.span.start, owner.span.end)})
        self._owners: list[list[_Owner]] = [[] for _ in self._bounds]
        place = {bound: i for i, bound in enumerate(self._bounds)}
        for owner in owners:
            for i in range(place[owner.span.start], place[owner.span.end]):
                self._owners[i].append(owner)

    def cover(self, need: _Owner, layouts: str) -> Iterator[tuple[int, int, list[_Owner]]]:
        """Splits a need where owners change; each part with its owners."""
        at, end = need.span.start, need.span.end
        while at < end:
            index = bisect_right(self._bounds, at) - 1
            holders = self._owners[index] if index >= 0 else []
            if not holders:
                raise RunError(
                    f"{need.span.tensor}, entry {at}: rank {need.rank} needs it, but no rank holds it ({layouts})"
                )
            until = min(end, self._bounds[index + 1])
            yield at, until - at, holders
            at = until


class _SourcePicker:
    """Chooses senders, and records how much each sends within its node and between nodes."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._sent = {crossing: [0] * len(nodes) for crossing in (False, True)}
        self.lower_bound = 0

    def pick(self, holders: list[_Owner], target: int, size: int) -> _Owner:
        local = next((owner for owner in holders if owner.rank == target), None)
        if local is not None:
            return local
        self.lower_bound += size
        node = self._nodes[target]
        near = [owner for owner in holders if self._nodes[owner.rank] == node]
        sent = self._sent[not near]
        chosen = min(near or holders, key=lambda owner: (sent[owner.rank], owner.rank))
        sent[chosen.rank] += size
        return chosen
