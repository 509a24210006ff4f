"""Detects lost ranks of other nodes; every rank that is still connected names them.

A library reports that something timed out or was closed, not which rank is missing. So each rank increments a counter
in the rendezvous store, which is on rank 0's node, once a second. When a connection breaks, ranks whose counters stand
still are lost; a rank that cannot reach the store is cut off itself. The first rank to detect the loss writes the names
to the store. Other ranks, which may wait for hours in a collective, read them at their next increment and also end. A
launch on one node does not need this: its launcher sees which rank died.
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
from typing import TYPE_CHECKING, Any, cast

from megatron_tlt.errors import RanksLost
from megatron_tlt.platform.nodes import node_name

if TYPE_CHECKING:
    import torch.distributed as dist

_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe|socket", re.IGNORECASE)
_EVERY_S = 1.0
_LISTEN_S = 3.0
"""A living rank increments its counter within this time."""
_SILENT_S = 120.0
"""A rank whose counter stands still for so many seconds is lost, whatever the others wait in.

NCCL raises nothing in a rank that waits for a dead one; its watchdog would end the process without a name.
"""
_RETRIES = 5
"""Beats in a row that may fail before a rank gives up counting."""
_STORE_S = 10.0
_POLL_S = 0.05
_LONGEST = 200  # characters of the library's message
_LOST, _HEARD = "lost", "heard"
_ends_once = threading.Lock()
_finds_out = threading.Event()
"""Set while this rank itself determines who is lost; it then ends after the other ranks have read the names."""


def is_broken_line(error: BaseException) -> bool:
    """Whether ``error``, or one of its causes, is torch's error for a broken connection between ranks."""
    import torch.distributed as dist

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and _BROKEN.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def end_once(error: RanksLost, end: Callable[[RanksLost], None]) -> None:
    """Lets the first calling thread run ``end``, which ends the process; other threads wait for that."""
    if _ends_once.acquire(blocking=False):
        end(error)
    time.sleep(_STORE_S)


def new_connection(store: dist.Store) -> dist.Store:
    """A second connection to the same store. A wait in one connection does not delay calls in the other."""
    connection: dist.Store = cast(Any, store).clone()  # every store has it; torch's stub omits it
    return connection


def _nodes() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def _node() -> str:
    return f"node {os.environ.get('GROUP_RANK', '0')}, {node_name()}"


def _end_plainly(error: RanksLost) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_status)


how_to_end: Callable[[RanksLost], None] = _end_plainly
"""Called when another rank has reported lost ranks; a worker also leaves its error for the launcher."""


def start_pulse(store: dist.Store, rank: int, world: int) -> None:
    """Starts incrementing this rank's counter if there are several nodes."""
    if _nodes() < 2:
        return
    stop = threading.Event()

    def beat() -> None:
        connected: dist.Store | None = None
        silence, failures = _SilenceCounter(), 0
        while failures < _RETRIES:
            try:
                if connected is None:  # own connection: a wait on the shared one would block this thread
                    connected = new_connection(store)
                    connected.set(f"where/{rank}", _node())
                connected.add(f"pulse/{rank}", 1)
                source = "reported by another rank"
                if silence.is_lost(connected, (rank + 1) % world) and not connected.check([_LOST]):
                    _report_silent(connected, rank, world)
                    source = "which stands still"
                if not _finds_out.is_set() and connected.check([_LOST]):
                    lost = _hear(connected, world)
                    told = RanksLost(f"rank {rank} ({_node()}) lost its connection to rank {lost}, {source}")
                    end_once(told, how_to_end)
                failures = 0
            except RuntimeError:  # a disturbance, or the store's node is gone: then the next collective reports it
                connected, failures = None, failures + 1
            if stop.wait(_EVERY_S):
                break
        if connected is not None:
            with suppress(RuntimeError):
                connected.set(f"ended/{rank}", "")

    thread = threading.Thread(target=beat, name="pulse", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(2 * _EVERY_S)

    atexit.register(end)


class _SilenceCounter:
    """Counts this rank's own looks at another's counter, so that time in which all ranks stand still is no silence.

    A rank whose Python lock is held in one call for all that time counts as lost too.
    """

    def __init__(self) -> None:
        self._count, self._looks = -1, 0

    def is_lost(self, connected: dist.Store, rank: int) -> bool:
        """Whether the counter of ``rank``, which started and has not ended, stood still for ``_SILENT_S`` looks."""
        count = connected.add(f"pulse/{rank}", 0)
        self._looks = self._looks + 1 if count == self._count else 0
        self._count = count
        if self._looks * _EVERY_S < _SILENT_S:
            return False
        started, ended = (connected.check([f"{key}/{rank}"]) for key in ("where", "ended"))
        return started and not ended


def _report_silent(connected: dist.Store, own: int, world: int) -> bool:
    """Tells all ranks which counters stand still for ``_LISTEN_S``; False if none does."""
    others = [rank for rank in range(world) if rank != own]

    def counts() -> list[int]:
        return [connected.add(f"pulse/{rank}", 0) for rank in others]

    before, end = counts(), time.monotonic() + _LISTEN_S
    while time.monotonic() < end and not connected.check([_LOST]):
        connected.add(f"pulse/{own}", 1)  # others listen too
        time.sleep(_POLL_S)
    if connected.check([_LOST]):
        return True
    silent = [rank for rank, was, now in zip(others, before, counts(), strict=True) if was == now]
    silent = [rank for rank in silent if not connected.check([f"ended/{rank}"])]
    if silent:
        names = ", ".join(f"{rank} ({connected.get(f'where/{rank}').decode()})" for rank in silent)
        connected.set(_LOST, f"{len(silent)} {names}")
    return bool(silent)


def _look(store: dist.Store, own: int, world: int, found: list[str]) -> None:
    """Adds the lost ranks to ``found``, reports them to all others, and waits until those have read them."""
    connected = new_connection(store)
    found.append(_hear(connected, world) if _report_silent(connected, own, world) else "")


def _hear(connected: dist.Store, world: int) -> str:
    """The lost ranks, once all other ranks have read them too: the store may end with this rank."""
    count, _, names = connected.get(_LOST).decode().partition(" ")
    connected.add(_HEARD, 1)
    end = time.monotonic() + _LISTEN_S
    with suppress(RuntimeError):  # the rank with the store has ended, as it should
        while connected.add(_HEARD, 0) < world - int(count) and time.monotonic() < end:
            time.sleep(_POLL_S)
    return names


def name_the_lost(error: BaseException) -> RanksLost | None:
    """The user's error if ``error`` is a broken connection between nodes; None for any other error.

    Takes a few seconds, or ten if this rank cannot reach the store.
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
        return RanksLost(f"{me} lost its connection to rank 0's node, whose store at {master} does not answer: {said}")
    if not found[0]:
        return RanksLost(f"{me}: a collective failed, but all ranks answer now: {said}")
    return RanksLost(f"{me} lost its connection to rank {found[0]}: {said}")
