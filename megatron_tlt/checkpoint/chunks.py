"""Writes and reads torch distributed checkpoints chunk by chunk, so that only one chunk is in memory at a time.

A chunk is a box of a named global tensor. A process that loads the checkpoint may use other boxes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_tlt.checkpoint.metadata import read_metadata
from megatron_tlt.errors import RunError


@dataclass(frozen=True)
class Chunk:
    """A box of global tensor ``key``; ``read`` returns its contents, a tensor of shape ``sizes``."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


class _ChunkSavePlanner(dcp.DefaultSavePlanner):
    """Plans to write this rank's chunks; reads each chunk only when the writer needs it."""

    def __init__(self, chunks: Sequence[Chunk], done: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False)
        self._done = done
        self._chunks = {MetadataIndex(chunk.key, torch.Size(chunk.offsets)): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, chunk in self._chunks.items():
            box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            data = TensorWriteData(box, TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        # The index returns with a hint that the planner did not set.
        chunk = self._chunks[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        tensor = chunk.read()
        self._done(chunk.num_bytes)
        return tensor


def write_chunks(folder: Path, chunks: Sequence[Chunk], done: Callable[[int], None]) -> None:
    """Writes this rank's chunks into ``folder``; a collective over the world, whose chunks together cover the tensors.

    ``done`` receives the bytes of each chunk. Raises RunError if writing fails, or the chunks do not cover their
    tensors.
    """
    # One thread and no copies ahead: a second chunk in memory would exceed the bound.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    try:
        dcp.save({}, storage_writer=writer, planner=_ChunkSavePlanner(chunks, done))
    except (OSError, CheckpointException) as error:
        failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        cause = failures[0][0] if failures else error
        if isinstance(cause, RunError):
            raise cause from None
        raise RunError(f"{folder}: not written: {cause}") from cause


class _OneChunkPlanner(dcp.DefaultLoadPlanner):
    """Lets a reader fill one tensor, whose place in the global tensor is in the plan."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class ChunkReader:
    """Reads boxes of a checkpoint's tensors one by one, in a single process.

    Raises:
        RunError: the folder does not hold a readable checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = dcp.FileSystemReader(folder)
        metadata = read_metadata(folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shape(self, key: str) -> tuple[int, ...]:
        """Raises RunError if there is no such tensor."""
        return tuple(self._entry(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Raises RunError if there is no such tensor."""
        dtype: torch.dtype = self._entry(key).properties.dtype
        return dtype

    def _entry(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise RunError(f"{self._folder}: no tensor {key!r} in the checkpoint")
        return self._tensors[key]

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Reads the box of ``sizes`` at ``offsets`` of tensor ``key``.

        Raises:
            RunError: there is no such tensor, the box exceeds it, or a file is damaged.
        """
        entry = self._entry(key)
        if len(sizes) != len(entry.size) or any(o + n > s for o, n, s in zip(offsets, sizes, entry.size, strict=True)):
            raise RunError(f"{self._folder}: tensor {key!r} has shape {tuple(entry.size)}; {tuple(sizes)} is requested")
        target = torch.empty(tuple(sizes), dtype=entry.properties.dtype)
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items: list[Any] = create_read_items_for_chunk_list(key, entry, [box])
        try:
            self._reader.read_data(LoadPlan(items), _OneChunkPlanner(target)).wait()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise RunError(f"{self._folder}: tensor {key!r} cannot be read: {reason}") from error
        return target
