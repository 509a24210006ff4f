"""What a run keeps on disks and in memory, with one interface: versions are written one after another, and read.

Everything in a version is made of its number, so a reader sees a mixture of two versions at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_tlt.bench.fault_parts.trial import Broken, check, wait_until
from megatron_tlt.checkpoint.files import LATEST, find_latest_whole
from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.checkpoint.manifest import MANIFEST, rewriting, verify_manifest
from megatron_tlt.checkpoint.memory_slots import Block, MemorySlot, SlotReader
from megatron_tlt.checkpoint.payload import Payload
from megatron_tlt.checkpoint.publication import Publication, publication_threads
from megatron_tlt.errors import RunError
from megatron_tlt.observe.jsonl import JsonLinesFile, read_jsonl
from megatron_tlt.spot.checkpointer import SelectiveCheckpointer, newest

_KIND = "faults.v1"
_WRITTEN_WITHIN_S = 60.0
_WEIGHTS = "model.safetensors"
_SHAPES = {"a": (300, 500), "b": (7,), "c": ()}


class Store(Protocol):
    """Writes and reads versions in a folder; an object is one writer, so each process makes its own."""

    name: str
    copies: int
    """Number of versions that are kept; with 1, a reader may refuse a damaged one."""

    def write(self, version: int) -> None:
        """Returns when the version would outlive this process.

        Raises:
            RunError: it cannot be written; earlier versions are unchanged.
        """
        ...

    def read(self) -> int | None:
        """The newest whole version; None if there is none.

        Raises:
            Broken: what was read mixes versions.
        """
        ...

    def files(self, version: int) -> list[Path]:
        """The files that a fault may damage: of this version, or shared by all."""
        ...


def _tensors(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in _SHAPES.items()}


def _check_tensors(found: dict[str, torch.Tensor], version: int) -> None:
    check({name: tuple(each.shape) for name, each in found.items()} == _SHAPES, f"version {version}: other tensors")
    check(all((each == version).all() for each in found.values()), f"version {version} is torn")


class CheckpointStore:
    """Checkpoints of a run: published folders with a manifest, two of which are kept."""

    name, copies = "checkpoint", 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cleaned = False
        self._threads: Executor | None = None

    def write(self, version: int) -> None:
        if not self._cleaned:
            clean_leftovers(self._folder)
            self._cleaned = True
        publication = Publication(self._folder / f"step_{version:06d}", keep=2)
        actor = publication.temporary / "actor"
        try:
            actor.mkdir()
            save_file(_tensors(version), actor / "weights.safetensors")
            (publication.temporary / "state.json").write_text(json.dumps({"step": version}))
        except (OSError, SafetensorError) as error:
            raise publication.abandon(RunError(str(error))) from error
        self._threads = self._threads or publication_threads()
        publication.start(self._threads)
        wait_until(publication.done, _WRITTEN_WITHIN_S, "the publication of a checkpoint")

    def read(self) -> int | None:
        folder, _ = find_latest_whole(self._folder)
        if folder is None:
            return None
        version = int(json.loads((folder / "state.json").read_text())["step"])
        _check_tensors(load_file(folder / "actor" / "weights.safetensors"), version)
        check(folder.name == f"step_{version:06d}", f"{folder.name} holds version {version}")
        return version

    def files(self, version: int) -> list[Path]:
        folder = self._folder / f"step_{version:06d}"
        inside = [folder / "actor" / "weights.safetensors", folder / "state.json", folder / MANIFEST]
        return [*inside, self._folder / LATEST]


class DrafterStore:
    """Checkpoints of the drafter that a session's leader writes in a thread."""

    name, copies = "drafter checkpoint", 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SelectiveCheckpointer | None = None

    def write(self, version: int) -> None:
        self._writer = self._writer or SelectiveCheckpointer(self._folder)
        failed = self._writer.counts.failed
        self._writer.save(version, Payload(_KIND, {"version": version}, _tensors(version)))
        check(self._writer.wait(_WRITTEN_WITHIN_S), "a drafter checkpoint is not written")
        if self._writer.counts.failed > failed:
            raise RunError(self._writer.counts.problem or "")

    def read(self) -> int | None:
        found = newest(self._folder, _KIND)
        if found is None:
            return None
        version = int(found.payload.header["version"])
        _check_tensors(dict(found.payload.tensors), version)
        return version

    def files(self, version: int) -> list[Path]:
        folder = self._folder / f"version-{version:09d}"
        return [*(path for path in folder.iterdir() if path.is_file()), self._folder / LATEST]


class MemoryStore:
    """A rank's two slots in memory, written in turn."""

    name, copies = "snapshot in memory", 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slots = [MemorySlot(folder / "slot_0"), MemorySlot(folder / "slot_1")]

    def write(self, version: int) -> None:
        slot = self._slots[version % 2]
        tensors = _tensors(version)
        slot.fill((Block(name, (0,) * len(t.shape), tuple(t.shape), "float32"), t) for name, t in tensors.items())
        slot.complete(version, slot.checksum(), {"version": version})

    def _whole(self) -> Iterator[SlotReader]:
        for slot in self._slots:
            with contextlib.suppress(RunError):
                reader = SlotReader(slot.folder)
                reader.verify()
                yield reader

    def read(self) -> int | None:
        reader = max(self._whole(), key=lambda one: one.step, default=None)
        if reader is None:
            return None
        check(reader.described == {"version": reader.step}, f"version {reader.step} has another description")
        _check_tensors({block.key: reader.tensor(block) for block in reader.blocks}, reader.step)
        return reader.step

    def files(self, version: int) -> list[Path]:
        return sorted(path for path in self._slots[version % 2].folder.iterdir() if not path.name.startswith("."))


class WeightStore:
    """A folder of weights in Hugging Face format whose files are replaced while it may be read."""

    name, copies = "weights", 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, version: int) -> None:
        with rewriting(self._folder) as staged:
            try:
                (staged / "config.json").write_text("{}")
                save_file(_tensors(version), staged / _WEIGHTS)
            except (OSError, SafetensorError) as error:
                raise RunError(str(error)) from error

    def read(self) -> int | None:
        if verify_manifest(self._folder):
            return None
        found = load_file(self._folder / _WEIGHTS)
        version = int(found["c"])
        _check_tensors(found, version)
        return version

    def files(self, version: int) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.is_file())


class RowStore:
    """The rows of a run's metrics; they have no checksums, so a flipped bit is not looked for."""

    name, copies = "metrics", 1

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._file: JsonLinesFile | None = None

    def write(self, version: int) -> None:
        self._file = self._file or JsonLinesFile(self._path)
        self._file.append([{"step": version, "values": [version] * 2000}])

    def read(self) -> int | None:
        if not self._path.exists():
            return None
        rows = read_jsonl(self._path)
        for number, row in enumerate(rows, start=1):
            if row != {"step": number, "values": [number] * 2000}:
                raise Broken(f"row {number} is torn")
        return len(rows)

    def files(self, version: int) -> list[Path]:
        return [self._path]


STORES: tuple[type[CheckpointStore | DrafterStore | MemoryStore | WeightStore | RowStore], ...] = (
    CheckpointStore,
    DrafterStore,
    MemoryStore,
    WeightStore,
    RowStore,
)
