"""Moves folders of plain files between ranks of different nodes, over a gloo group."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import write_errors
from megatron_tlt.platform.memory_files import allocate

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class FolderTransfer:
    """A folder that rank ``source`` sends to rank ``target``; each has its own path of it."""

    source: int
    target: int


def _send(data: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
    for chunk in data.split(_CHUNK_BYTES):
        dist.send(chunk, target, group)


def send_folder(folder: Path, last: str, target: int, group: dist.ProcessGroup) -> None:
    """Sends all files below ``folder``, the file ``last`` at the end, to a rank that calls :func:`receive_folder`.

    Args:
        folder: whose files do not change meanwhile.
        last: name of the file that makes the folder complete.
        target: a rank of the world.
        group: of gloo.

    Raises:
        RunError: the other rank has no room for them.
    """
    files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda file: (file.name == last, str(file)))
    listed = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
    header = torch.frombuffer(bytearray(msgspec.msgpack.encode(listed)), dtype=torch.uint8)
    dist.send(torch.tensor([len(header)]), target, group)
    dist.send(header, target, group)
    accepted = torch.zeros(1, dtype=torch.int64)
    dist.recv(accepted, target, group)
    if not accepted.item():
        raise RunError(f"{folder}: rank {target} cannot take a copy; its node has too little memory")
    for file, (_, size) in zip(files, listed, strict=True):
        if size:
            with file.open("rb") as opened:
                memory = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
                _send(torch.frombuffer(memory, dtype=torch.uint8), target, group)


def receive_folder(folder: Path, source: int, group: dist.ProcessGroup) -> None:
    """Writes what :func:`send_folder` of rank ``source`` sends; files that it replaces keep their memory.

    Raises:
        RunError: there is no room for them, or a name leads out of the folder; the sender then raises one too.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group)
    header = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(header, source, group)
    listed = msgspec.msgpack.decode(header.numpy().tobytes(), type=list[tuple[str, int]])
    try:
        with write_errors(folder):
            memories = _reserved(folder, listed)
    except RunError:
        dist.send(torch.tensor([0]), source, group)
        raise
    dist.send(torch.tensor([1]), source, group)
    for memory in memories:
        for chunk in torch.frombuffer(memory, dtype=torch.uint8).split(_CHUNK_BYTES):
            dist.recv(chunk, source, group)


def _reserved(folder: Path, listed: Sequence[tuple[str, int]]) -> list[mmap.mmap]:
    """The memory of all files that are not empty, allocated before a byte arrives."""
    if listed:
        (folder / listed[-1][0]).unlink(missing_ok=True)  # incomplete until the last file has arrived
    memories = []
    for name, size in listed:
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise RunError(f"{name!r} leads out of {folder}")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+b") as opened:
            allocate(opened, size)
            if size:
                memories.append(mmap.mmap(opened.fileno(), size))
    return memories


def exchange_folders(
    transfers: Sequence[FolderTransfer], paths: Sequence[Path], last: str, own: int, group: dist.ProcessGroup
) -> None:
    """Carries out transfers one after another; every rank of them calls it with the same ones.

    One that a rank has no room for is left out, and the others go on, as their ranks wait for each other.

    Args:
        transfers: in the same order on all ranks.
        paths: this rank's path of the folder of each.
        last: as in :func:`send_folder`.
        own: this rank.
        group: of gloo.

    Raises:
        RunError: a transfer of this rank was left out.
    """
    refused: RunError | None = None
    for transfer, folder in zip(transfers, paths, strict=True):
        try:
            if transfer.source == own:
                send_folder(folder, last, transfer.target, group)
            elif transfer.target == own:
                receive_folder(folder, transfer.source, group)
        except RunError as error:
            refused = refused or error
    if refused is not None:
        raise refused
