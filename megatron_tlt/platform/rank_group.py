"""The interface for training over a group of ranks: two collectives, called in the same order by all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from megatron_tlt.errors import RunError


class GroupFailed(RunError):
    """Another member, or the connection to it, failed; this rank's own work did not fail."""


class RankGroup(Protocol):
    """Ranks that compute together. ``ranks`` are global, in group order; ``rank`` is this process's.

    Both collectives work in place and return when this rank's part is complete. A failed one leaves its tensors
    undefined.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def rank(self) -> int: ...

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums each tensor over the members; raises GroupFailed if a member is gone."""
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Broadcasts the tensors of global rank ``source`` to every member; raises like ``all_reduce``."""
        ...


class WholeGroup:
    """An ordinary process group, by default the world; a wait ends only with its collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.ranks = tuple(dist.get_process_group_ranks(self._group))
        self.rank = dist.get_rank()

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        for work in [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]:
            work.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        for work in [dist.broadcast(tensor, source, group=self._group, async_op=True) for tensor in tensors]:
            work.wait()


def broadcast_plain(group: RankGroup, value: Any, kind: Any, source: int, device: torch.device) -> Any:
    """Broadcasts plain data of type ``kind`` from global rank ``source``; the other members' ``value`` is ignored."""
    payload = bytearray(msgspec.msgpack.encode(value)) if group.rank == source else bytearray()
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    group.broadcast([length], source)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    if payload:
        data.copy_(torch.frombuffer(payload, dtype=torch.uint8))
    group.broadcast([data], source)
    return msgspec.msgpack.decode(data.cpu().numpy().tobytes(), type=kind)
