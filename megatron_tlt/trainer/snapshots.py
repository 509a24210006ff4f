"""Snapshots of a run in host memory, from which it goes on after a killed rank without reading a checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_tlt.actor.megatron_snapshot import blocks_to_keep, load_blocks
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.manifest import verify_manifest, write_manifest
from megatron_tlt.checkpoint.memory_slots import INDEX, BlockSource, MemorySlot, SlotReader
from megatron_tlt.checkpoint.parts import CheckpointPart, save_parts
from megatron_tlt.checkpoint.shared import run_together
from megatron_tlt.checkpoint.snapshot_places import SavedPart, WholeSnapshot, buddies, needed_copies, newest_whole
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RunError, TltError
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.snapshots import slot_bytes
from megatron_tlt.platform.collectives import all_gather_data, broadcast_data, failing_together
from megatron_tlt.platform.device import barrier, collective_timeout_s, log_once, rank, warn, world_size
from megatron_tlt.platform.file_exchange import FolderTransfer, exchange_folders
from megatron_tlt.platform.memory_folder import SNAPSHOTS
from megatron_tlt.platform.nodes import node_index
from megatron_tlt.platform.threads import started_pool
from megatron_tlt.trainer.checkpoints import TrainerState

_SLOTS = ("slot_0", "slot_1")
_MARGIN = 1.05
"""Pages to make, over the planned ones: what is not needed is given back, and what lacks takes long."""
_STATE, _WORLD, _LAYOUT, _RANK, _SAVE = "state", "world_size", "layout", "rank", "save"


class Snapshots:
    """Two slots in memory, of which one always has a whole snapshot; every method is a collective over the world.

    ``begin`` copies the state right after an update. ``commit`` publishes the copy once the step is recorded, so a run
    that continues from it misses nothing, and sends it to another node, if there is one, while the next step goes on. A
    rank is in the next ``begin`` only after all ranks have committed, as every step has collectives in between; so the
    older slot can be written over.

    Args:
        root: the folder of all snapshots of this launch on this node, on tmpfs.
        parts: state saved in addition to the actor's.
        node: this node's number.
        expected_bytes: of a rank's snapshot. The first slot's pages are made for so many while the first step goes on.

    Raises:
        RunError: the thread cannot be started.
    """

    def __init__(self, root: Path, parts: Sequence[CheckpointPart], node: int = 0, expected_bytes: int = 0) -> None:
        self._root = root
        self._parts = parts
        self._nodes = all_gather_data(node, int)
        self._buddies = buddies(self._nodes)
        self._attempt = broadcast_data(time.time_ns() if rank() == 0 else None, int)
        self._begun = 0
        limit = timedelta(seconds=collective_timeout_s())
        self._group = dist.new_group(backend="gloo", timeout=limit) if len(set(self._nodes)) > 1 else None
        self._slots = [MemorySlot(root / name / _folder(rank())) for name in _SLOTS]
        self._next = 0
        self._step: int | None = None  # of the snapshot that is begun and not committed
        self._pool = started_pool(1, "snapshot")
        self._checksum: Future[int] | None = None
        self._sent: Future[None] | None = None
        self._expected_bytes = expected_bytes
        self._made: dict[int, Future[None]] = {}  # the pages of each slot
        self._layout: dict[str, int] = {}
        self._failed = False
        self.newest_step = 0
        """Step of the newest snapshot that is published; 0 before the first."""
        self.copy_s = 0.0
        """Seconds that the newest ``begin`` took."""

    @classmethod
    def of_launch(cls, parts: Sequence[CheckpointPart], config: TltConfig) -> Snapshots:
        """Those of the launch that started this process.

        Raises:
            ConfigError: it was started without ``tlt``.
        """
        root = os.environ.get(SNAPSHOTS)
        if root is None:
            raise ConfigError(
                "elastic: found a section; its snapshots need a process that outlives ranks; allowed: tlt"
            )
        try:
            expected = int(_MARGIN * slot_bytes(job_of(config)))
        except ConfigError:  # an architecture that cannot be planned: the first copy makes the pages
            expected = 0
        return cls(Path(root), parts, node_index(), expected)

    @property
    def bytes_used(self) -> int:
        """Bytes of this rank's newest snapshot; the two slots take twice as many."""
        return max(slot.bytes_used for slot in self._slots)

    def begin(self, policy: Policy, step: int) -> None:
        """Copies the state after ``step``; if memory is short, warns and makes no snapshots from then on."""
        if self._failed:
            return
        began, self._begun = time.perf_counter(), self._begun + 1
        index, self._next = self._next, 1 - self._next
        slot = self._slots[index]
        self._layout = policy.layout
        if (made := self._made.get(index)) is not None:
            made.exception()  # what failed is tried again, and reported then
        parts = slot.folder.with_name(_parts(rank()))
        try:
            with _failing_together_in(slot.folder):
                if self._sent is not None:
                    self._sent.result()  # all copies of the newest snapshot are whole before the older is written over
            blocks, files = blocks_to_keep(policy)
            with _failing_together_in(slot.folder):
                self._remove_other_ranks(slot.folder.parent)
                shutil.rmtree(parts, ignore_errors=True)
                parts.mkdir(parents=True)
                save_parts(self._parts, parts, rank())
                slot.fill(blocks)
                for name, data in files.items():
                    (parts / name).write_bytes(data)
        except RunError as error:
            self._give_up(step, error)
            return
        self._step = step
        self._checksum = self._pool.submit(_sums_of, slot, parts)
        self.copy_s = time.perf_counter() - began

    def _give_up(self, step: int, error: RunError) -> None:
        self._failed, self._step = True, None
        warn(f"no snapshots from step {step} on: {error}")

    def _remove_other_ranks(self, slot: Path) -> None:
        """Removes what ranks of a larger process group left in a slot that is written over."""
        if rank() == self._nodes.index(self._nodes[rank()]):
            for folder in slot.glob("*_*"):
                if int(folder.name.rpartition("_")[2]) >= world_size():
                    shutil.rmtree(folder, ignore_errors=True)

    def commit(self, state: TrainerState) -> None:
        """Publishes what was begun, with the trainer's state; nothing if nothing was begun since.

        If memory is short, warns and makes no snapshots from then on.
        """
        if self._step is None:
            return
        assert self._checksum is not None and state.step == self._step
        slot = self._slots[1 - self._next]
        described = {_STATE: asdict(state), _WORLD: world_size(), _LAYOUT: self._layout, _RANK: rank()}
        described[_SAVE] = f"{self._attempt:020d}-{self._begun:08d}"
        try:
            with _failing_together_in(slot.folder):
                slot.complete(self._step, self._checksum.result(), described)
        except RunError as error:
            self._give_up(self._step, error)
            return
        self.newest_step, self._step = self._step, None
        if self._group is not None:
            self._sent = self._pool.submit(self._send, slot.folder.parent, self._group)
        self._make_pages(slot.bytes_used)

    def _make_pages(self, size: int) -> None:
        """Makes the next slot's pages in the background, once: it takes several times as long as a copy."""
        if self._next not in self._made:
            room = 2 * size * self._nodes.count(self._nodes[rank()])  # the other ranks of this node make theirs
            self._made[self._next] = self._pool.submit(self._slots[self._next].reserve, size, room)

    def _send(self, slot: Path, group: dist.ProcessGroup) -> None:
        """Sends this rank's part to its buddy, and receives those that it is the buddy of."""
        positions = {node: position for position, node in enumerate(sorted(set(self._nodes)))}
        # every second node sends while the others receive, then the other way round
        order = sorted(range(world_size()), key=lambda source: positions[self._nodes[source]] % 2)
        transfers = [FolderTransfer(source, self._buddies[source]) for source in order]
        for folder in (_parts, _folder):
            _exchange(slot, transfers, [slot / folder(each.source) for each in transfers], group)

    def resume(self, policy: Policy, least: int) -> TrainerState | None:
        """Restores the newest whole snapshot; None if there is none of step ``least`` or later, or it is damaged.

        Where ranks have left snapshots that cannot be used, a warning says why; the policy is then undefined.
        """
        everywhere = all_gather_data(self._present(), list[SavedPart])
        whole = newest_whole(dict(zip(self._nodes, everywhere, strict=True)))
        if whole is None:
            if any(everywhere):
                warn("no snapshot in memory is whole: the run restarts from its newest checkpoint")
            else:
                self._make_pages(self._expected_bytes)
            return None
        if (step := whole.step) < least:
            return None
        try:
            state = self._restored(policy, whole)
        except RunError as error:
            warn(f"the snapshot of step {step} cannot be used: {error}; the run restarts from its newest checkpoint")
            self.forget()
            return None
        self._next, self.newest_step = 1 - _SLOTS.index(whole.slot), step
        log_once(f"resumed from the snapshot of step {step} in memory")
        return state

    def _present(self) -> list[SavedPart]:
        """The ranks' snapshots on this node."""
        found = []
        for name in _SLOTS:
            for folder in sorted((self._root / name).glob("rank_*")):
                if (reader := _reader(folder)) is not None:
                    save, world, saved = (reader.described[key] for key in (_SAVE, _WORLD, _RANK))
                    found.append(SavedPart(save, reader.step, name, world, saved))
        return found

    def forget(self) -> None:
        """Makes all slots incomplete, as steps that are repeated from a checkpoint must not meet their snapshots.

        Copies that are still on their way arrive first. One that is begun is not committed any more.
        """
        self.newest_step, self._step = 0, None
        if self._sent is not None:
            self._sent.exception()  # what failed is reported by the next begin
        barrier()
        for slot in self._slots:
            for folder in slot.folder.parent.glob("rank_*"):
                (folder / INDEX).unlink(missing_ok=True)
        barrier()

    def _restored(self, policy: Policy, whole: WholeSnapshot) -> TrainerState:
        slot, world, present = self._root / whole.slot, whole.world, whole.present
        layouts = all_gather_data(self._layout_of(slot, present), dict[str, int] | None)
        alike = world == world_size() and all(found in (None, policy.layout) for found in layouts)
        node = self._nodes[rank()]
        # under the same layout a rank has all of its blocks itself
        needed = {
            n: [r for r, other in enumerate(self._nodes) if other == n] if alike else range(world) for n in present
        }
        self._fetch(slot, needed, present, _folder)
        self._fetch(slot, dict.fromkeys(present, range(world)), present, _parts)
        with failing_together():
            own = [rank()] if alike else sorted(needed[node])
            readers = [SlotReader(slot / _folder(saved)) for saved in own]
        # each node has copies of its own; its ranks share the work
        peers = [r for r, other in enumerate(self._nodes) if other == node]
        share, parts = slice(peers.index(rank()), None, len(peers)), [slot / _parts(saved) for saved in range(world)]
        run_together(lambda: _verify(readers if alike else readers[share], parts[share]))
        load_blocks(policy, BlockSource(readers), [parts[saved] for saved in own], alike=alike)
        for part in self._parts:
            folders = [f for saved in range(world) for f in (slot / _parts(saved) / part.name).glob("rank_*")]
            if folders:
                part.load(folders)
            else:
                warn(f"the snapshot has no {part.name!r}: that part starts anew")
        if alike and self._group is not None and self._lacks_second_copies(whole):
            self._sent = self._pool.submit(self._send, slot, self._group)
        return TrainerState(**readers[0].described[_STATE])

    def _lacks_second_copies(self, whole: WholeSnapshot) -> bool:
        """Whether a node was replaced since, so that a rank's buddy has no copy of it."""
        return any(saved not in whole.present[self._nodes[buddy]] for saved, buddy in enumerate(self._buddies))

    def _layout_of(self, slot: Path, present: Mapping[int, list[int]]) -> dict[str, int] | None:
        ranks = present[self._nodes[rank()]]
        return dict(SlotReader(slot / _folder(ranks[0])).described[_LAYOUT]) if ranks else None

    def _fetch(
        self,
        slot: Path,
        needed: Mapping[int, Collection[int]],
        present: Mapping[int, Collection[int]],
        folder: Callable[[int], str],
    ) -> None:
        """Brings to each node the folders of ranks that it needs and lacks."""
        copies = needed_copies(present, needed)
        if not copies:
            return
        assert self._group is not None
        first = {node: self._nodes.index(node) for node in present}
        transfers = [FolderTransfer(first[copy.source], first[copy.target]) for copy in copies]
        paths = [slot / folder(copy.saved) for copy in copies]
        group = self._group
        run_together(lambda: _exchange(slot, transfers, paths, group))

    def close(self) -> None:
        """Ends the thread once the newest copy has arrived on the other node."""
        self._pool.shutdown()


def _folder(saved: int) -> str:
    return f"rank_{saved:05d}"


def _parts(saved: int) -> str:
    return f"parts_{saved:05d}"


@contextlib.contextmanager
def _any_error_in(folder: Path) -> Iterator[None]:
    """Raises any error in the block as a RunError, so that other ranks can be told of it."""
    try:
        yield
    except TltError:
        raise
    except Exception as error:  # of files, torch, safetensors, gloo
        raise RunError(f"{folder}: {type(error).__name__}: {error}") from error


def _exchange(slot: Path, transfers: Sequence[FolderTransfer], paths: Sequence[Path], group: dist.ProcessGroup) -> None:
    with _any_error_in(slot):
        exchange_folders(transfers, paths, INDEX, rank(), group)


@contextlib.contextmanager
def _failing_together_in(folder: Path) -> Iterator[None]:
    """As ``failing_together``, with any error; the block has no collective."""
    with failing_together(), _any_error_in(folder):
        yield


def _sums_of(slot: MemorySlot, parts: Path) -> int:
    """Writes the sums of the parts' files, and returns that of the blocks."""
    write_manifest(parts)
    return slot.checksum()


def _verify(readers: Sequence[SlotReader], parts: Sequence[Path]) -> None:
    for reader in readers:
        reader.verify()
    for folder in parts:
        if problems := verify_manifest(folder):
            raise RunError(problems[0])


def _reader(folder: Path) -> SlotReader | None:
    try:
        return SlotReader(folder)
    except RunError:
        return None
