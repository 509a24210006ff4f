"""Moves folders of plain files between ranks of different nodes, over a gloo group."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

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
    """
    files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda file: (file.name == last, str(file)))
    listed = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
    header = torch.frombuffer(bytearray(msgspec.msgpack.encode(listed)), dtype=torch.uint8)
    dist.send(torch.tensor([len(header)]), target, group)
    dist.send(header, target, group)
    for file, (_, size) in zip(files, listed, strict=True):
        if size:
            with file.open("rb") as opened:
                memory = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
                _send(torch.frombuffer(memory, dtype=torch.uint8), target, group)


def receive_folder(folder: Path, source: int, group: dist.ProcessGroup) -> None:
    """Writes what :func:`send_folder` of rank ``source`` sends; files that it replaces keep their memory.

    Raises:
        ValueError: a name leads out of the folder.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group)
    header = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(header, source, group)
    listed = msgspec.msgpack.decode(header.numpy().tobytes(), type=list[tuple[str, int]])
    if listed:
        (folder / listed[-1][0]).unlink(missing_ok=True)  # incomplete until the last file has arrived
    for name, size in listed:
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name!r} leads out of {folder}")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+b") as opened:
            opened.truncate(size)
            if size:
                memory = mmap.mmap(opened.fileno(), size)
                for chunk in torch.frombuffer(memory, dtype=torch.uint8).split(_CHUNK_BYTES):
                    dist.recv(chunk, source, group)


def exchange_folders(
    transfers: Sequence[FolderTransfer], paths: Sequence[Path], last: str, own: int, group: dist.ProcessGroup
) -> None:
    """Carries out transfers one after another; every rank of them calls it with the same ones.

    Args:
        transfers: in the same order on all ranks.
        paths: this rank's path of the folder of each.
        last: as in :func:`send_folder`.
        own: this rank.
        group: of gloo.
    """
    for transfer, folder in zip(transfers, paths, strict=True):
        if transfer.source == own:
            send_folder(folder, last, transfer.target, group)
        elif transfer.target == own:
            receive_folder(folder, transfer.source, group)
