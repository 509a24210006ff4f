"""What training over some ranks needs of them: two collectives, in the same order on all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from megatron_tlt.errors import RunError


class GroupFailed(RunError):
    """Something went wrong on another member, or between them; this rank's own part was well."""


class RankGroup(Protocol):
    """Ranks that compute together. ``ranks`` are global, in the order of the group; ``rank`` is this process's own.

    Both collectives work in place and return when all is done here. A failed one leaves its tensors undefined.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def rank(self) -> int: ...

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums each tensor over the members; raises GroupFailed where a member is gone."""
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Global rank ``source``'s tensors on every member; raises as ``all_reduce``."""
        ...


class WholeGroup:
    """An ordinary process group, the world by default; its waits end when the collective does."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.ranks = tuple(dist.get_process_group_ranks(self._group))
        self.rank = dist.get_rank()

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """As :class:`RankGroup`'s."""
        for work in [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]:
            work.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """As :class:`RankGroup`'s."""
        for work in [dist.broadcast(tensor, source, group=self._group, async_op=True) for tensor in tensors]:
            work.wait()


def broadcast_plain(group: RankGroup, value: Any, kind: Any, source: int, device: torch.device) -> Any:
    """Global rank ``source``'s plain data, of type ``kind``, on every member; what the others give is not looked at."""
    payload = bytearray(msgspec.msgpack.encode(value)) if group.rank == source else bytearray()
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    group.broadcast([length], source)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    if payload:
        data.copy_(torch.frombuffer(payload, dtype=torch.uint8))
    group.broadcast([data], source)
    return msgspec.msgpack.decode(data.cpu().numpy().tobytes(), type=kind)
