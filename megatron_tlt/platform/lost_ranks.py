"""Ranks of other nodes that do not answer any more: which ones, said by every rank that is still in touch.

A library says that something timed out or was closed, not who is missing. So each rank counts up in the rendezvous'
store, which is on rank 0's node, once a second. Where a line breaks, those that do not count on are lost, and who
cannot reach the store is cut off itself. The first to find out leaves the names there: the others, which may wait for
hours in a collective, read them at their next count and end too. One node needs none of this: its launcher sees who
died.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from megatron_tlt.errors import RanksLost
from megatron_tlt.platform.nodes import node_name
from megatron_tlt.platform.store import new_connection

if TYPE_CHECKING:
    import torch.distributed as dist

_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe|socket", re.IGNORECASE)
_EVERY_S = 1.0
_LISTEN_S = 3.0
"""A living rank counts within that."""
_STORE_S = 10.0
_POLL_S = 0.05
_LONGEST = 200  # characters of the library's message
_LOST, _HEARD = "lost", "heard"
_ends_once = threading.Lock()
_finds_out = threading.Event()
"""This rank asks itself who is missing: it needs nobody to tell it, and ends once the others have heard."""


def is_broken_line(error: BaseException) -> bool:
    """Whether ``error`` is torch's about the lines between ranks, or was raised from such a one."""
    import torch.distributed as dist

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and _BROKEN.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def end_once(error: RanksLost, end: Callable[[RanksLost], None]) -> None:
    """Calls ``end``, which ends the process; by the first thread that comes, while others wait for their end."""
    if _ends_once.acquire(blocking=False):
        end(error)
    time.sleep(_STORE_S)


def _nodes() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def _node() -> str:
    return f"node {os.environ.get('GROUP_RANK', '0')}, {node_name()}"


def _end_plainly(error: RanksLost) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_status)


how_to_end: Callable[[RanksLost], None] = _end_plainly
"""What a process does that hears of lost ranks from another; a worker leaves its error for the launcher too."""


def start_pulse(store: dist.Store, rank: int, world: int) -> None:
    """Has this rank count from now on, where there are several nodes."""
    if _nodes() < 2:
        return
    stop = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # the store's node has gone: the next collective says so
            connected = new_connection(store)  # a wait in the other connection must not delay this thread
            connected.set(f"where/{rank}", _node())
            while not stop.wait(_EVERY_S):
                connected.add(f"pulse/{rank}", 1)
                if not _finds_out.is_set() and connected.check([_LOST]):
                    lost = _hear(connected, world)
                    told = RanksLost(
                        f"rank {rank} ({_node()}) lost its connection to rank {lost}, as another rank found"
                    )
                    end_once(told, how_to_end)

    thread = threading.Thread(target=beat, name="pulse", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(2 * _EVERY_S)

    atexit.register(end)


def _look(store: dist.Store, own: int, world: int, found: list[str]) -> None:
    """Leaves in ``found`` which ranks do not count, and tells all others; waits until they have heard of it."""
    connected = new_connection(store)
    others = [rank for rank in range(world) if rank != own]

    def counts() -> list[int]:
        return [connected.add(f"pulse/{rank}", 0) for rank in others]

    before, end = counts(), time.monotonic() + _LISTEN_S
    while time.monotonic() < end and not connected.check([_LOST]):
        time.sleep(_POLL_S)
    if not connected.check([_LOST]):
        silent = [rank for rank, was, now in zip(others, before, counts(), strict=True) if was == now]
        if not silent:
            found.append("")
            return
        names = ", ".join(f"{rank} ({connected.get(f'where/{rank}').decode()})" for rank in silent)
        connected.set(_LOST, f"{len(silent)} {names}")
    found.append(_hear(connected, world))


def _hear(connected: dist.Store, world: int) -> str:
    """Who is lost, once all others have heard it too: the store may end with this rank."""
    count, _, names = connected.get(_LOST).decode().partition(" ")
    connected.add(_HEARD, 1)
    end = time.monotonic() + _LISTEN_S
    while connected.add(_HEARD, 0) < world - int(count) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return names


def name_the_lost(error: BaseException) -> RanksLost | None:
    """The error for the user where ``error`` is a broken line between nodes; None where it is anything else.

    Takes some seconds, ten where this rank is cut off from the store.
    """
    if _nodes() < 2 or not is_broken_line(error):
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    _finds_out.set()
    store, own, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    found: list[str] = []

    def run() -> None:
        with suppress(RuntimeError):
            _look(store, own, world, found)

    looking = threading.Thread(target=run, name="lost-ranks", daemon=True)
    looking.start()
    looking.join(_STORE_S)
    me = f"rank {own} ({_node()})"
    said = (str(error).splitlines() or [type(error).__name__])[0][:_LONGEST]
    if not found:
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return RanksLost(f"{me} lost its connection to the node of rank 0, whose store at {master} is silent: {said}")
    if not found[0]:
        return RanksLost(f"{me}: a collective broke off, and now all ranks answer again: {said}")
    return RanksLost(f"{me} lost its connection to rank {found[0]}: {said}")
