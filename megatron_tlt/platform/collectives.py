"""Plain data over torch.distributed: msgpack bytes in tensors, never pickle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from megatron_tlt.errors import ConfigError, RunError, TltError
from megatron_tlt.platform.device import current_device, rank, world_size
from megatron_tlt.platform.rank_group import WholeGroup, broadcast_plain

T = TypeVar("T")


@dataclass(frozen=True)
class Members:
    """The ranks of a collective: the world, or those of a gloo ``group``, whose tensors lie on the host."""

    group: dist.ProcessGroup | None
    size: int
    own: int
    """This rank's number among them."""
    device: torch.device

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Members:
        """The members of ``group``; None is the world."""
        if group is None:
            return cls(None, world_size(), rank(), current_device().torch_device)
        return cls(group, dist.get_world_size(group), dist.get_rank(group), torch.device("cpu"))


def _gather_bytes(payload: bytes, members: Members) -> list[bytes]:
    device = members.device
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(members.size)]
    dist.all_gather(lengths, length, group=members.group)
    longest = max(1, max(int(item) for item in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=members.group)
    return [row[: int(n)].cpu().numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]


def all_gather_data(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gathers every rank's ``value``, plain data of type ``kind``, in rank order; the type is checked on arrival.

    ``group``: of gloo; None is the world.
    """
    members = Members.of(group)
    if members.size == 1:
        return [value]
    return [msgspec.msgpack.decode(row, type=kind) for row in _gather_bytes(msgspec.msgpack.encode(value), members)]


def broadcast_data(value: T | None, kind: Any) -> T:
    """Broadcasts rank 0's value, plain data of type ``kind``, to every rank."""
    if world_size() == 1:
        return value  # type: ignore[return-value]
    found: T = broadcast_plain(WholeGroup(), value, kind, 0, current_device().torch_device)
    return found


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is true on at least one rank of ``group`` (as above); all get the same answer."""
    members = Members.of(group)
    if members.size == 1:
        return flag
    tensor = torch.tensor([int(flag)], dtype=torch.int32, device=members.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return bool(int(tensor))


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises a ConfigError or RunError of one rank on every rank of ``group``, so that none waits for it.

    The block must not contain a collective that the failing rank skips.
    """
    error: TltError | None = None
    try:
        yield
    except (ConfigError, RunError) as caught:
        error = caught
    if any_rank(error is not None, group):
        mine = None if error is None else (isinstance(error, ConfigError), str(error))
        everyone = all_gather_data(mine, tuple[bool, str] | None, group)
        is_config, message = next(found for found in everyone if found is not None)
        raise (ConfigError if is_config else RunError)(message) from error
