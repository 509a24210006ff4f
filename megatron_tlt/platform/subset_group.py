"""Process groups over some ranks, made by these alone and given up without waiting for anybody.

``dist.new_group`` is a collective over the world, which a rank that still decodes cannot join. And a collective that
hangs blocks its thread: gloo's cannot be aborted. So members first see that all of them are there, and then look at
their collectives instead of waiting for them.
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
from megatron_tlt.platform.rank_group import GroupFailed
from megatron_tlt.platform.store import new_connection

_POLL_S = 2e-4
_MEETING_POLL_S = 2e-3  # a question to the store's process each time
_GONE = 1 << 32
_abandoned: list[object] = []
"""Groups and tensors that a hung collective may still write to; they last as long as the process."""


class Abandoned(GroupFailed):
    """A group was given up before its members were through."""


@dataclass(frozen=True)
class SubsetGroup:
    """A group over global ``ranks``, in that order; a ``RankGroup``.

    Args:
        rank: this process's.
        group: for ``dist``'s functions, which take ranks inside of it as ``group_src``.
        should_abandon: asked while a collective is under way.
        timeout_s: of a collective.
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
        """Makes the group once all members have come; members call it with the same name, which no group had before.

        Either all of them make it or none does: who goes before the last one has come takes the group along.

        Args:
            should_go: asked until all members have come.
            should_abandon: asked afterwards, in every collective.

        Raises:
            Abandoned: ``should_go`` said so here or elsewhere, or somebody was missing after ``timeout_s``.
            GroupFailed: the members have come, but could not be connected.
        """
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        own = dist.get_rank()
        _meet(store, name, len(ranks), should_go, timeout_s)
        index, timeout = list(ranks).index(own), timedelta(seconds=timeout_s)

        def connect() -> dist.ProcessGroup:
            connected = new_connection(store)
            # Any: a backend has the collectives of a ProcessGroup, but torch's stub omits them.
            if current_device().is_cuda:
                options = dist.ProcessGroupNCCL.Options()
                # its watchdog would end the process: the deadline is kept here
                options._timeout = 10 * timeout
                nccl: Any = dist.ProcessGroupNCCL(connected, index, len(ranks), options)
                # the first collective connects, and waits for all members: that too is to happen beside
                torch.cuda.set_device(current_device().torch_device)
                nccl.allreduce(torch.zeros(1, device=current_device().torch_device)).wait()
                return nccl
            gloo: Any = dist.ProcessGroupGloo(connected, index, len(ranks), timeout)
            return gloo

        made = _beside(connect, name, should_abandon, timeout_s)
        return cls(tuple(ranks), own, made, should_abandon, timeout_s)

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums each tensor over the members, in place.

        Raises:
            Abandoned: ``should_abandon`` said so, or it took longer than ``timeout_s``; the tensors belong to the hung
                collective then, and are not to be used.
            GroupFailed: a member is gone.
        """
        self._finish(lambda x: dist.all_reduce(x, group=self.group, async_op=True), tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Global rank ``source``'s tensors on every member, in place; raises as ``all_reduce``."""
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
                    why = f"a member did not come within {self.timeout_s} s" if late else "its session is over"
                    raise Abandoned(f"a collective over ranks {list(self.ranks)} was given up: {why}")
                time.sleep(_POLL_S)
            for work in pending:
                work.wait()
        except Abandoned:
            raise
        except RuntimeError as error:
            raise GroupFailed(f"a collective over ranks {list(self.ranks)} failed: {error}") from error

    def _abandon(self, *parts: object) -> None:
        if current_device().is_cuda:
            self.group.abort()  # a kernel that waits for ever would keep the device from all others
        else:
            _abandoned.append((self.group, parts))


def _meet(store: dist.Store, name: str, count: int, should_go: Callable[[], bool], timeout_s: float) -> None:
    """Returns where all ``count`` members have come.

    One counter holds who came and, in its upper half, who went again. The first to go sees in it whether all had come
    before, and says so to the others, who may have come later.
    """
    deadline = time.monotonic() + timeout_s
    why = "a member has gone"
    come = store.add("members", 1)
    while come < count:
        late = time.monotonic() > deadline
        if late or should_go():
            why = f"not all {count} members came within {timeout_s} s" if late else "its session is over"
            come = store.add("members", _GONE)
            if come // _GONE == 1:
                store.set("verdict", "met" if come % _GONE == count else "gone")
            break
        time.sleep(_MEETING_POLL_S)
        come = store.add("members", 0)
    if come < _GONE:
        return
    while not store.check(["verdict"]):  # its writer is between two lines
        if time.monotonic() > deadline + timeout_s:
            break
        time.sleep(_MEETING_POLL_S)
    else:
        if store.get("verdict") == b"met":
            return
    raise Abandoned(f"group {name} was given up: {why}")


def _beside(
    connect: Callable[[], dist.ProcessGroup], name: str, should_abandon: Callable[[], bool], timeout_s: float
) -> dist.ProcessGroup:
    """The group that ``connect`` makes on a thread, which is left to itself where a member died or hangs in it."""
    made: list[dist.ProcessGroup] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(connect())
        except Exception as error:  # torch's own, of several kinds
            failed.append(error)

    deadline = time.monotonic() + timeout_s
    thread = threading.Thread(target=run, name="connect-group", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_MEETING_POLL_S)
        if thread.is_alive() and (should_abandon() or time.monotonic() > deadline):
            raise Abandoned(f"group {name} was given up: a member does not connect")
    if failed:
        raise GroupFailed(f"group {name} could not be made: {failed[0]}") from failed[0]
    return made[0]
