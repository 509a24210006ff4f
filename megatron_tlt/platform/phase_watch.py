"""Ends a run whose phase takes longer than it may, and says which rank it waits for.

Each rank counts in the rendezvous store, once a second, and notes its phase there. The first rank whose phase is
overdue looks for a few seconds at the others' counters: those that stand still belong to processes that are stopped or
gone. If none does, some rank computes or waits without end. Meanwhile every rank that answers writes its stacks and
torch's flight record, so those of the rank that the others wait for are among them.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatron_tlt.errors import RanksLost
from megatron_tlt.platform import lost_ranks
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.flight_record import flight_records, lacks_records, waits_in
from megatron_tlt.platform.nodes import node_name

if TYPE_CHECKING:
    import torch.distributed as dist

_EVERY_S = 1.0
_LISTEN_S = 4.0
"""A living rank counts within this time."""
_KEY = "launcher.phase_timeouts_s"
_WRITE = "watch/write"
"""A rank is overdue: all write their stacks and records."""
_RECORD_S = 60
"""A flight record asks CUDA, which may hang as well: then the process ends without it."""


class PhaseWatch:
    """Watches the phases of one rank; :meth:`begin` names the current one.

    Args:
        limits_s: seconds by phase, infinite for one that may take any time.
        store: shared by all ranks.
        rank: of this process.
        world: number of ranks.
        folder: for stacks and flight records; created in need.
        end: called with the error; ends the process.
    """

    def __init__(
        self,
        limits_s: Mapping[str, float],
        store: dist.Store,
        rank: int,
        world: int,
        folder: Path,
        end: Callable[[RanksLost], None] | None = None,
    ) -> None:
        self._limits_s, self._store, self._rank, self._world = limits_s, store, rank, world
        self._folder, self._end = folder, end
        self._current: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="phase-watch", daemon=True)
        if any(math.isfinite(limit) for limit in limits_s.values()):
            self._thread.start()

    @classmethod
    def of_this_rank(cls, limits_s: Mapping[str, float], folder: Path) -> PhaseWatch:
        """Of this process as a rank of the world."""
        import torch.distributed as dist

        from megatron_tlt.platform.device import warn

        store = dist.distributed_c10d._get_default_store()
        if lacking := lacks_records():
            warn(f"this release of torch has none of {lacking}: a phase that hangs ends without its collective's name")
        return cls(limits_s, store, dist.get_rank(), dist.get_world_size(), folder)

    def begin(self, phase: str) -> None:
        """The current phase ends and ``phase`` begins.

        Raises:
            ValueError: no limit is given for it, so nobody could set one.
        """
        if phase not in self._limits_s:
            raise ValueError(f"phase {phase!r}: found no limit; allowed: {', '.join(self._limits_s)}")
        self._current = (phase, time.monotonic())

    def pause(self) -> None:
        """The current phase ends; none begins yet."""
        self._current = None

    def close(self) -> None:
        """The last phase ends."""
        self.pause()
        self._closed.set()

    def _watch(self) -> None:
        connected: dist.Store | None = None
        noted, written = None, False
        while not self._closed.wait(_EVERY_S):
            current = self._current
            try:
                if connected is None:  # own connection: a wait on the shared one would block this thread
                    connected = lost_ranks.new_connection(self._store)
                connected.add(f"watch/{self._rank}", 1)
                if current is not None and current is not noted:
                    connected.set(f"phase/{self._rank}", current[0])
                    noted = current
                if not written and connected.check([_WRITE]):
                    self._write()
                    written = True
            except RuntimeError:
                connected = noted = None
            if current is not None and time.monotonic() - current[1] > self._limits_s[current[0]]:
                self._overdue(current[0], connected)
                return

    def _overdue(self, phase: str, connected: dist.Store | None) -> None:
        others = "the rendezvous store does not answer"
        if connected is not None:
            with suppress(RuntimeError):
                connected.set(_WRITE, "")
                others = self._others(connected)
        said = (
            f"rank {self._rank} ({node_name()}) is in phase {phase!r} for longer than {_KEY} allows, "
            f"{self._limits_s[phase]:g} s, in {self._operation()}"
        )
        print(f"{said}; {others}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(_RECORD_S, exit=True, file=2)
        waits, written = self._write()
        faulthandler.cancel_dump_traceback_later()
        error = RanksLost(f"{said}{waits}; {others}; {written}")
        lost_ranks.end_once(error, self._end or lost_ranks.how_to_end)

    def _others(self, connected: dist.Store) -> str:
        ranks = [rank for rank in range(self._world) if rank != self._rank]
        before = [connected.add(f"watch/{rank}", 0) for rank in ranks]
        end = time.monotonic() + _LISTEN_S
        while time.monotonic() < end:
            connected.add(f"watch/{self._rank}", 1)  # others listen too
            time.sleep(_LISTEN_S / 20)
        silent = [r for r, was in zip(ranks, before, strict=True) if connected.add(f"watch/{r}", 0) == was]
        where = {r: connected.get(f"phase/{r}").decode() if connected.check([f"phase/{r}"]) else "start" for r in ranks}
        if silent:
            return "standing still: " + ", ".join(f"rank {r} in {where[r]!r}" for r in silent)
        if not ranks:
            return "there is no other rank"
        return "all others answer: " + ", ".join(f"rank {r} in {where[r]!r}" for r in ranks)

    def _operation(self) -> str:
        """torch's collective in the main thread, if it is in one, and the line of this package that it comes from."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        collective = place = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if "torch/distributed/" in file and not collective:
                collective = f"{frame.f_code.co_name} of "
            if "megatron_tlt/" in file and not place:
                place = f"megatron_tlt/{file.rpartition('megatron_tlt/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return f"{collective}{place or 'an unknown place'}"

    def _write(self) -> tuple[str, str]:
        """Writes the stacks of all threads and the flight records; the collective that is waited for, and where."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            stacks = self._folder / f"stacks-rank{self._rank:05d}.txt"
            with stacks.open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return "", f"its stacks cannot be written: {error}"
        waits, written = "", f"stacks: {stacks}"
        try:
            records = flight_records()
            path = self._folder / f"collectives-rank{self._rank:05d}.json"
            atomic_write_text(path, json.dumps(records), durable=False)
            written += f", collectives: {path}"
            if found := waits_in(records):
                waits = f", waiting in {found}"
        except Exception:  # a broken communicator must not hide the error itself
            traceback.print_exc()
        return waits, f"{written} (and of all ranks that answer)"
