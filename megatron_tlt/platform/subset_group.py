"""Process groups over some ranks, formed by these alone and abandoned without waiting for any rank.

``dist.new_group`` is a collective over the world, which a decoding rank cannot join. Also, a hanging collective blocks
its thread: gloo's cannot be aborted. So members first check that all have arrived, and then poll their collectives
instead of blocking in them.

Connecting takes time, and with NCCL 0.15 GB of device memory. So a connection serves all later groups over the same
ranks, until a collective over it fails or is abandoned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.platform.device import current_device
from megatron_tlt.platform.lost_ranks import new_connection
from megatron_tlt.platform.rank_group import GroupFailed

_POLL_S = 2e-4
_MEETING_POLL_S = 2e-3  # each poll is a request to the store's process
_GONE = 1 << 32
_MOST_CONNECTIONS = 4
_connections: dict[tuple[int, ...], tuple[str, dist.ProcessGroup]] = {}
"""Ranks -> the group that connected them and the connection; the least recently used first."""
_abandoned: list[object] = []
"""Groups and tensors that a hanging collective may still write to; kept until the process ends."""


class Abandoned(GroupFailed):
    """A group was abandoned before its members had finished."""


@dataclass(frozen=True)
class SubsetGroup:
    """A ``RankGroup`` over global ``ranks``, in that order.

    ``group`` is for functions of ``dist``, which take a rank within it as ``group_src``. A collective takes at most
    ``timeout_s`` and polls ``should_abandon``.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup
    should_abandon: Callable[[], bool]
    timeout_s: float

    @classmethod
    def form(
        cls,
        name: str,
        ranks: Sequence[int],
        should_go: Callable[[], bool],
        should_abandon: Callable[[], bool],
        timeout_s: float,
    ) -> SubsetGroup:
        """Forms the group once all members have arrived; all pass the same name, which no earlier group used.

        Members that all hold the connection of the same earlier group use it again.

        If any member aborts before all have arrived, formation fails everywhere. Members poll ``should_go`` until all
        have arrived, and ``should_abandon`` afterwards, in every collective.

        Raises:
            Abandoned: ``should_go`` was true on a member, or a member was missing after ``timeout_s``.
            GroupFailed: all members arrived but could not be connected.
        """
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        own, members = dist.get_rank(), tuple(ranks)
        earlier = _connections.pop(members, None)
        if earlier is not None:
            store.add(f"held: {earlier[0]}", 1)
        try:
            _meet(store, name, len(ranks), should_go, timeout_s)
        except Abandoned:
            if earlier is not None:
                _connections[members] = earlier  # unused, so as good as before
            raise
        if earlier is not None:
            if store.add(f"held: {earlier[0]}", 0) == len(ranks):
                _connections[members] = earlier
                return cls(members, own, earlier[1], should_abandon, timeout_s)
            _disconnect(earlier[1])  # another member has lost it
        index, timeout = list(ranks).index(own), timedelta(seconds=timeout_s)

        def connect(publish: Callable[[dist.ProcessGroup], None]) -> None:
            # own connection: a wait for a key blocks all other requests of the same connection
            connected = new_connection(store)
            # Any: a backend has the collectives of a ProcessGroup, but torch's stub omits them.
            if current_device().is_cuda:
                options = dist.ProcessGroupNCCL.Options()
                # NCCL's watchdog would end the process: this class enforces the deadline
                options._timeout = 10 * timeout
                nccl: Any = dist.ProcessGroupNCCL(connected, index, len(ranks), options)
                device = current_device().torch_device
                torch.cuda.set_device(device)
                nccl.eager_connect_single_device(device)
                publish(nccl)
                # it connects the rest and waits for all members: do that in this thread too
                nccl.allreduce(torch.zeros(1, device=device)).wait()
            else:
                gloo: Any = dist.ProcessGroupGloo(connected, index, len(ranks), timeout)
                publish(gloo)

        made = _beside(connect, name, should_abandon, timeout_s)
        _connections[members] = (name, made)
        if len(_connections) > _MOST_CONNECTIONS:
            _disconnect(_connections.pop(next(iter(_connections)))[1])
        return cls(members, own, made, should_abandon, timeout_s)

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums each tensor over the members, in place.

        Raises:
            Abandoned: ``should_abandon`` was true, or the collective exceeded ``timeout_s``; it may still write to the
                tensors, which must not be used.
            GroupFailed: a member is gone.
        """
        self._finish(lambda x: dist.all_reduce(x, group=self.group, async_op=True), tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Broadcasts the tensors of global rank ``source``, in place; raises like ``all_reduce``."""
        at = self.ranks.index(source)
        self._finish(lambda x: dist.broadcast(x, group_src=at, group=self.group, async_op=True), tensors)

    def _finish(self, begin: Callable[[torch.Tensor], dist.Work | None], tensors: Sequence[torch.Tensor]) -> None:
        deadline = time.monotonic() + self.timeout_s
        try:
            pending = [work for work in map(begin, tensors) if work is not None]
            while not all(work.is_completed() for work in pending):
                late = time.monotonic() > deadline
                if late or self.should_abandon():
                    self._abandon(pending, tensors)
                    why = f"a member did not arrive within {self.timeout_s} s" if late else "its session is over"
                    raise Abandoned(f"a collective over ranks {list(self.ranks)} was abandoned: {why}")
                time.sleep(_POLL_S)
            for work in pending:
                work.wait()
        except Abandoned:
            raise
        except RuntimeError as error:
            _connections.pop(self.ranks, None)
            _disconnect(self.group)
            raise GroupFailed(f"a collective over ranks {list(self.ranks)} failed: {error}") from error

    def _abandon(self, *parts: object) -> None:
        _connections.pop(self.ranks, None)
        if current_device().is_cuda:
            _disconnect(self.group)  # a waiting kernel would block the device for all other work
        else:
            _abandoned.append((self.group, parts))


def _disconnect(group: dist.ProcessGroup) -> None:
    """Frees an NCCL communicator now: garbage collection would do it whenever it runs, holding the interpreter."""
    if current_device().is_cuda:
        group.abort()


def _meet(store: dist.Store, name: str, count: int, should_go: Callable[[], bool], timeout_s: float) -> None:
    """Returns once all ``count`` members have arrived.

    One counter holds the arrivals and, in its upper half, the departures. The first member to leave reads from it
    whether all had arrived before, and writes that verdict for the others, which may have arrived later.
    """
    deadline = time.monotonic() + timeout_s
    why = "a member has left"
    come = store.add("members", 1)
    while come < count:
        late = time.monotonic() > deadline
        if late or should_go():
            why = f"not all {count} members arrived within {timeout_s} s" if late else "its session is over"
            come = store.add("members", _GONE)
            if come // _GONE == 1:
                store.set("verdict", "met" if come % _GONE == count else "gone")
            break
        time.sleep(_MEETING_POLL_S)
        come = store.add("members", 0)
    if come < _GONE:
        return
    while not store.check(["verdict"]):  # its writer has not set it yet
        if time.monotonic() > deadline + timeout_s:
            break
        time.sleep(_MEETING_POLL_S)
    else:
        if store.get("verdict") == b"met":
            return
    raise Abandoned(f"group {name} was abandoned: {why}")


def _beside(
    connect: Callable[[Callable[[dist.ProcessGroup], None]], None],
    name: str,
    should_abandon: Callable[[], bool],
    timeout_s: float,
) -> dist.ProcessGroup:
    """Runs ``connect`` on a thread and returns the group that it publishes, before the group's first collective.

    If a member died or hangs, that group is aborted, and the thread ends as soon as its call to the library returns.
    """
    made: list[dist.ProcessGroup] = []
    failed: list[Exception] = []
    left = threading.Event()

    def publish(group: dist.ProcessGroup) -> None:
        made.append(group)
        if left.is_set():  # before it launches a kernel that waits for the missing member
            _disconnect(group)
            raise Abandoned(f"group {name} was abandoned while it connected")

    def give_up() -> None:
        left.set()
        for group in made:
            _disconnect(group)

    def run() -> None:
        try:
            connect(publish)
        except Exception as error:  # torch raises several types
            failed.append(error)

    deadline = time.monotonic() + timeout_s
    thread = threading.Thread(target=run, name="connect-group", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_MEETING_POLL_S)
        if thread.is_alive() and (should_abandon() or time.monotonic() > deadline):
            give_up()
            raise Abandoned(f"group {name} was abandoned: a member does not connect")
    if failed:
        give_up()
        raise GroupFailed(f"group {name} could not be formed: {failed[0]}") from failed[0]
    return made[0]
