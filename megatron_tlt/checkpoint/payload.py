"""A training state as one safetensors file: named tensors, and plain data in its metadata.

All code that reads or writes drafter training states uses this module, so every reader understands every file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_tlt.errors import ConfigError

STATE = "training.safetensors"
"""Name of the file, in any folder."""


@dataclass(frozen=True)
class Payload:
    """Named tensors, their type (``megatron_tlt.drafter.v1``), and ``header``, which is JSON data."""

    kind: str
    header: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def write_payload(path: Path, payload: Payload) -> None:
    """Writes ``path`` directly from the tensors' memory: on the host, contiguous, and unchanged meanwhile.

    The GIL is released during the write, so other threads continue. The caller flushes and renames, with
    ``atomic_file`` or ``atomic_folder``.

    Raises:
        OSError: the disk is full or the file cannot be written.
        TypeError: the header contains non-JSON data.
    """
    metadata = {"format": payload.kind, "header": json.dumps(payload.header)}
    try:
        save_file(dict(payload.tensors), path, metadata=metadata)
    except SafetensorError as error:  # its message is that of the operating system
        raise OSError(str(error)) from error


def read_payload(path: Path, kind: str) -> Payload:
    """Reads a file of :func:`write_payload`; the tensors have their own memory, so that the file may be deleted.

    Raises:
        ConfigError: it is of another kind, or unreadable.
    """
    try:
        with safe_open(path, "pt", backend="pread") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != kind:
                raise ConfigError(f"{path}: its format is {metadata.get('format')!r}; allowed: {kind!r}")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dictionary
        return Payload(kind, json.loads(metadata["header"]), tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
