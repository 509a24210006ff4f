"""A rank's state in host memory that outlives its process: blocks of tensors, with their places in the whole tensors.

A slot is a folder on tmpfs. Its large file is written over and over, so that its pages stay allocated; ``index.json``
is removed before that and written last, so a slot with an index is complete.
"""

from __future__ import annotations

import json
import math
import mmap
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import atomic_write_text, write_errors
from megatron_tlt.platform.memory_files import allocate

INDEX, DATA = "index.json", "blocks.bin"
_ALIGNED = 64
_PAGES = 16384
"""Pages that are made in one operation: for more elements torch would start threads."""
_OWN_SUM = "index_crc32"


def _own_sum(index: dict[str, Any]) -> int:
    """CRC-32 of an index without its own sum: a step or place that changed must not pass for a true one."""
    return zlib.crc32(json.dumps(index).encode())


@dataclass(frozen=True)
class Block:
    """A block of a whole tensor: its first index and extent per axis, its dtype, and its first byte in the file."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    begin: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What this block and another one of the same tensor share, as slices of each; empty slices for nothing."""
        own, other = [], []
        for mine, extent, begin, size in zip(self.offsets, self.sizes, offsets, sizes, strict=True):
            first, last = max(mine, begin), min(mine + extent, begin + size)
            last = max(first, last)
            own.append(slice(first - mine, last - mine))
            other.append(slice(first - begin, last - begin))
        return tuple(own), tuple(other)


class MemorySlot:
    """Writes snapshots into one folder, one after another.

    Args:
        folder: made on the first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._memory: mmap.mmap | None = None
        self._blocks: list[Block] = []
        self._used = 0
        self._size = 0  # of the file; the memory may be longer

    def fill(self, named: Iterable[tuple[Block, torch.Tensor]]) -> None:
        """Copies tensors into the slot, which is incomplete from now on until :meth:`complete`.

        Raises:
            RunError: there is not enough memory, or the folder cannot be written to.
        """
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / INDEX).unlink(missing_ok=True)
        self._blocks, tensors, end = [], [], 0
        for block, tensor in named:
            self._blocks.append(Block(block.key, block.offsets, block.sizes, block.dtype, end))
            tensors.append(tensor)
            end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        self._used = end
        buffer = torch.frombuffer(self._reserved(end), dtype=torch.uint8) if end else torch.empty(0, dtype=torch.uint8)
        for block, tensor in zip(self._blocks, tensors, strict=True):
            target = buffer[block.begin :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor.detach())

    def reserve(self, size: int, room: int = 0) -> None:
        """Makes the pages that a snapshot of ``size`` bytes will take, if the slot was never used.

        Nothing is done unless ``room`` bytes are free, so that other files in memory are not refused meanwhile.

        Raises:
            RunError: there is not enough memory, or the folder cannot be written to.
        """
        if not size or (self.folder / DATA).exists():
            return
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < room:
                return
        # mapped by touching them, without Python's lock: mmap itself would hold it, and so stop all other threads
        for pages in torch.frombuffer(self._reserved(size), dtype=torch.uint8)[:: mmap.PAGESIZE].split(_PAGES):
            pages.zero_()

    def _reserved(self, size: int) -> mmap.mmap:
        """The slot's memory, at least as long; the file has exactly so many bytes, so more must not be touched."""
        if self._memory is not None and self._size == size:
            return self._memory
        if self._memory is not None and len(self._memory) < size:
            self._memory = None
        file = self.folder / DATA
        try:
            with file.open("a+b") as opened:
                allocate(opened, size)
                if self._memory is None:  # to map pages again takes as long as to make them
                    self._memory = mmap.mmap(opened.fileno(), size)
                self._size = size
        except OSError as error:
            self._memory, self._size = None, 0
            file.unlink(missing_ok=True)
            raise RunError(
                f"{file}: {size / 1e6:.0f} MB cannot be reserved: {error.strerror}; allowed: another elastic.memory_dir"
            ) from error
        return self._memory

    def checksum(self) -> int:
        """CRC-32 of what is in the slot."""
        return zlib.crc32(memoryview(self._memory)[: self._used]) if self._memory is not None else 0

    def complete(self, step: int, checksum: int, described: dict[str, Any]) -> None:
        """Publishes what the slot holds as the snapshot of ``step``; ``described``: plain data to keep with it."""
        index = {
            "step": step,
            "bytes": self._used,
            "crc32": checksum,
            "described": described,
            "blocks": [asdict(block) for block in self._blocks],
        }
        index[_OWN_SUM] = _own_sum(index)
        atomic_write_text(self.folder / INDEX, json.dumps(index))

    @property
    def bytes_used(self) -> int:
        """Bytes of the newest snapshot's tensors."""
        return self._used


class SlotReader:
    """A complete slot.

    Args:
        folder: of the slot.

    Raises:
        RunError: it is incomplete or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index.pop(_OWN_SUM) != _own_sum(index):
                raise ValueError(f"{INDEX} is damaged")
            self.step, self._used, self._crc32 = int(index["step"]), int(index["bytes"]), int(index["crc32"])
            self.described: dict[str, Any] = index["described"]
            self.blocks = [
                Block(each["key"], tuple(each["offsets"]), tuple(each["sizes"]), each["dtype"], each["begin"])
                for each in index["blocks"]
            ]
            self._memory: mmap.mmap | None = None
            if self._used:
                with (folder / DATA).open("rb") as opened:
                    self._memory = mmap.mmap(opened.fileno(), self._used, access=mmap.ACCESS_COPY)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{folder}: not a complete snapshot: {error}") from error

    def verify(self) -> None:
        """Compares the checksum; raises RunError if the memory was changed."""
        found = zlib.crc32(memoryview(self._memory)) if self._memory is not None else 0
        if found != self._crc32:
            raise RunError(f"{self.folder / DATA}: found checksum {found:08x}; expected {self._crc32:08x}")

    def tensor(self, block: Block) -> torch.Tensor:
        """A block's values, (sizes); they must not be changed."""
        dtype = getattr(torch, block.dtype)
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=dtype, count=block.numel, offset=block.begin).view(block.sizes)


class BlockSource:
    """The whole tensors whose blocks lie in some slots."""

    def __init__(self, readers: Sequence[SlotReader]) -> None:
        self._left: dict[Block, int] = {}
        self._found: dict[str, list[tuple[SlotReader, Block]]] = defaultdict(list)
        seen = set()
        for reader in readers:
            for block in reader.blocks:
                place = block.key, block.offsets, block.sizes
                if place not in seen:  # replicas have the same blocks
                    seen.add(place)
                    self._found[block.key].append((reader, block))
                    self._left[block] = block.numel

    def fill(self, target: torch.Tensor, key: str, offsets: Sequence[int], *, partly: bool = False) -> None:
        """Copies a part of a tensor, which begins at ``offsets``, into ``target``; its dtype decides.

        Args:
            target: (sizes), with the whole tensor's number of axes.
            key: of the tensor.
            offsets: first index per axis.
            partly: entries that no slot has are left as they are, such as the padding of a vocabulary.

        Raises:
            RunError: entries are missing.
        """
        covered = 0
        for reader, block in self._found.get(key, ()):
            own, other = block.overlap(offsets, target.shape)
            count = math.prod(each.stop - each.start for each in own)
            if count:
                target[other].copy_(reader.tensor(block)[own])
                covered += count
                self._left[block] -= count
        if covered != target.numel() and not partly:
            raise RunError(f"{key}: the snapshot has {covered} of {target.numel()} entries from {tuple(offsets)}")

    def check_all_used(self) -> None:
        """Raises RunError if entries of some block were not asked for; names the tensor."""
        for block, left in self._left.items():
            if left > 0:
                raise RunError(f"{block.key}: {left} of {block.numel} entries from {block.offsets} have no place")
