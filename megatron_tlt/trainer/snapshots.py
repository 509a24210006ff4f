"""Snapshots of a run in host memory, from which it goes on after a killed rank without reading a checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from megatron_tlt.actor.megatron_snapshot import blocks_to_keep, load_blocks
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.memory_slots import INDEX, BlockSource, MemorySlot, SlotReader
from megatron_tlt.checkpoint.parts import CheckpointPart, save_parts
from megatron_tlt.checkpoint.shared import run_together
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.collectives import all_gather_data, failing_together
from megatron_tlt.platform.device import barrier, log_once, rank, warn, world_size
from megatron_tlt.platform.memory_folder import SNAPSHOTS
from megatron_tlt.trainer.checkpoints import TrainerState

_SLOTS = ("slot_0", "slot_1")
_STATE, _WORLD = "state", "world_size"


class Snapshots:
    """Two slots in memory, of which one always has a whole snapshot; every method is a collective over the world.

    ``begin`` copies the state right after an update. ``commit`` publishes the copy once the step is recorded, so a run
    that continues from it misses nothing. A rank is in the next ``begin`` only after all ranks have committed, as every
    step has collectives in between; so the older slot can be written over.

    Args:
        root: the folder of all snapshots of this launch on this node, on tmpfs.
        parts: state saved in addition to the actor's.
    """

    def __init__(self, root: Path, parts: Sequence[CheckpointPart]) -> None:
        self._root = root
        self._parts = parts
        self._slots = [MemorySlot(root / name / f"rank_{rank():05d}") for name in _SLOTS]
        self._next = 0
        self._step: int | None = None  # of the snapshot that is begun and not committed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._checksum: Future[int] | None = None
        self._failed = False
        self.copy_s = 0.0
        """Seconds that the newest ``begin`` took."""

    @classmethod
    def of_launch(cls, parts: Sequence[CheckpointPart]) -> Snapshots:
        """Those of the launch that started this process.

        Raises:
            ConfigError: it was started without ``tlt``.
        """
        root = os.environ.get(SNAPSHOTS)
        if root is None:
            raise ConfigError(
                "elastic: found a section; its snapshots need a process that outlives ranks; allowed: tlt"
            )
        return cls(Path(root), parts)

    @property
    def bytes_used(self) -> int:
        """Bytes of this rank's newest snapshot; the two slots take twice as many."""
        return max(slot.bytes_used for slot in self._slots)

    def begin(self, policy: Policy, step: int) -> None:
        """Copies the state after ``step``; if memory is short, warns and makes no snapshots from then on."""
        if self._failed:
            return
        began = time.perf_counter()
        slot, self._next = self._slots[self._next], 1 - self._next
        try:
            with failing_together():
                self._remove_other_ranks(slot.folder.parent)
                shutil.rmtree(slot.folder / "parts", ignore_errors=True)
                (slot.folder / "parts").mkdir(parents=True)
                save_parts(self._parts, slot.folder / "parts", rank())
            blocks = blocks_to_keep(policy, slot.folder)
            with failing_together():
                slot.fill(blocks)
        except RunError as error:
            self._failed, self._step = True, None
            warn(f"no snapshots from step {step} on: {error}")
            return
        self._step = step
        self._checksum = self._pool.submit(slot.checksum)
        self.copy_s = time.perf_counter() - began

    def _remove_other_ranks(self, slot: Path) -> None:
        """Removes what ranks of a larger process group left in a slot that is written over."""
        if rank() == 0:
            for folder in slot.glob("rank_*"):
                if int(folder.name.removeprefix("rank_")) >= world_size():
                    shutil.rmtree(folder, ignore_errors=True)

    def commit(self, state: TrainerState) -> None:
        """Publishes what was begun, with the trainer's state; nothing if nothing was begun since."""
        if self._step is None:
            return
        assert self._checksum is not None and state.step == self._step
        slot = self._slots[1 - self._next]
        slot.complete(self._step, self._checksum.result(), {_STATE: asdict(state), _WORLD: world_size()})
        self._step = None

    def _whole(self) -> dict[int, Path]:
        """The slot of each step of which every rank's part is here; the same on all ranks."""
        here: dict[int, str] = {}
        for name in _SLOTS:
            parts = [reader for folder in (self._root / name).glob("rank_*") if (reader := _reader(folder)) is not None]
            for step in {reader.step for reader in parts}:
                of_step = [reader for reader in parts if reader.step == step]
                if len(of_step) == of_step[0].described[_WORLD]:
                    here[step] = name
        everywhere = all_gather_data(here, dict[int, str])
        return {step: self._root / name for step, name in here.items() if all(step in other for other in everywhere)}

    def resume(self, policy: Policy, least: int) -> TrainerState | None:
        """Restores the newest whole snapshot; None if there is none of step ``least`` or later, or it is damaged.

        Where ranks have left snapshots that cannot be used, a warning says why; the policy is then undefined.
        """
        found = self._whole()
        if not found:
            if any(any((self._root / name).glob("rank_*")) for name in _SLOTS):
                warn("no snapshot in memory is whole: the run restarts from its newest checkpoint")
            return None
        if (step := max(found)) < least:
            return None
        try:
            state = self._restored(policy, found[step])
        except RunError as error:
            warn(f"the snapshot of step {step} cannot be used: {error}; the run restarts from its newest checkpoint")
            self._forget()
            return None
        self._next = 1 - _SLOTS.index(found[step].name)
        log_once(f"resumed from the snapshot of step {step} in memory")
        return state

    def _forget(self) -> None:
        """Makes all slots incomplete, as steps that are repeated from a checkpoint must not meet their snapshots."""
        for slot in self._slots:
            (slot.folder / INDEX).unlink(missing_ok=True)
        barrier()

    def _restored(self, policy: Policy, slot: Path) -> TrainerState:
        readers = [SlotReader(folder) for folder in sorted(slot.glob("rank_*"))]
        run_together(lambda: _verify(readers[rank() :: world_size()]))
        load_blocks(policy, BlockSource(readers), [reader.folder for reader in readers])
        self._load_parts(readers)
        return TrainerState(**readers[0].described[_STATE])

    def _load_parts(self, readers: Sequence[SlotReader]) -> None:
        for part in self._parts:
            folders = [folder for reader in readers for folder in (reader.folder / "parts" / part.name).glob("rank_*")]
            if folders:
                part.load(folders)
            else:
                warn(f"the snapshot has no {part.name!r}: that part starts anew")

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()


def _verify(readers: Sequence[SlotReader]) -> None:
    for reader in readers:
        reader.verify()


def _reader(folder: Path) -> SlotReader | None:
    try:
        return SlotReader(folder)
    except RunError:
        return None
