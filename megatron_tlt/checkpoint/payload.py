"""A training state as one safetensors file: named tensors, and plain data beside them in its metadata.

Every writer and reader of a drafter's training goes through here, so a state that one of them wrote is every reader's.
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
"""What the file is called, in whichever folder."""


@dataclass(frozen=True)
class Payload:
    """Named tensors, what they are (``megatron_tlt.drafter.v1``), and ``header``: data that JSON can hold."""

    kind: str
    header: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def write_payload(path: Path, payload: Payload) -> None:
    """Writes ``path`` straight from the tensors' memory: on the host, contiguous, and left alone meanwhile.

    The interpreter is free while bytes are written, so other threads go on. Neither flushed nor renamed: that is the
    caller's, by ``atomic_file`` or ``atomic_folder``.

    Raises:
        OSError: the disk is full or the file cannot be written.
        TypeError: the header holds what JSON cannot.
    """
    metadata = {"format": payload.kind, "header": json.dumps(payload.header)}
    try:
        save_file(dict(payload.tensors), path, metadata=metadata)
    except SafetensorError as error:  # its message is the operating system's
        raise OSError(str(error)) from error


def read_payload(path: Path, kind: str) -> Payload:
    """What :func:`write_payload` wrote; the tensors lie in memory of their own, so that the file may go away.

    Raises:
        ConfigError: it is of another kind, or cannot be read.
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
