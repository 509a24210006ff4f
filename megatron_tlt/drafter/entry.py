"""A response as training data of the drafter, and its file format: safetensors with a checked header.

The header holds a CRC of all bytes after it. The sizes in the header detect a truncated file; the CRC detects bytes
that never reached the disk.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from megatron_tlt.config.drafter import ENTRY_OVERHEAD_BYTES
from megatron_tlt.errors import ConfigError

MAX_KEY_CHARACTERS = 200

_MAGIC = b"TLTDRAFT"
_PREFIX = struct.Struct("<8sII")  # magic, CRC-32 of the rest, bytes of the description


class DamagedEntry(Exception):
    """The bytes are not an intact entry; the message states the defect."""


@dataclass(frozen=True)
class Entry:
    """A prompt with one response, T tokens in all, with the target's hidden states.

    Attributes:
        key: unique name within a run (step, problem, sample); adding the key again replaces the entry.
        step: the RL step that sampled it.
        token_ids: (T), int32.
        prompt_length: tokens before the response.
        hidden: (T, E) in bfloat16 (or float32). Row t holds the target's hidden states at token t; the state after the
            final norm comes last. E is H, or 4 H with three auxiliary layers before it.
        reward: of the response.
    """

    key: str
    step: int
    token_ids: torch.Tensor
    prompt_length: int
    hidden: torch.Tensor
    reward: float

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        shapes = {"token_ids": self.token_ids.shape == (length,), "hidden": self.hidden.shape[:-1] == (length,)}
        wrong = [
            f"{name} does not have one row for each of {length} tokens" for name, right in shapes.items() if not right
        ]
        if not 0 < self.prompt_length <= length:
            wrong.append(f"prompt_length is {self.prompt_length}; allowed: 1 to {length}")
        if not math.isfinite(self.reward):
            wrong.append(f"reward is {self.reward}; allowed: a finite number")
        if not 0 < len(self.key) <= MAX_KEY_CHARACTERS:
            wrong.append(f"the key has {len(self.key)} characters; allowed: 1 to {MAX_KEY_CHARACTERS}")
        if wrong:
            raise ConfigError("\n".join(f"drafter entry {self.key[:MAX_KEY_CHARACTERS]!r}: {line}" for line in wrong))

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.token_ids)

    @property
    def width(self) -> int:
        """Width E of the hidden states."""
        return int(self.hidden.shape[1])

    @property
    def num_drafted(self) -> int:
        """Number of response tokens that a first draft step can predict: all but the first."""
        return max(0, self.length - self.prompt_length - 1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {"token_ids": self.token_ids, "hidden": self.hidden}

    @property
    def nbytes(self) -> int:
        """Bytes that it counts for in memory and on disk; its file is never larger."""
        return sum(tensor.nbytes for tensor in self.tensors().values()) + ENTRY_OVERHEAD_BYTES


@dataclass(frozen=True)
class Description:
    """Properties of an entry without its tensors; ``nbytes`` as :attr:`Entry.nbytes`."""

    key: str
    step: int
    length: int
    prompt_length: int
    reward: float
    width: int
    nbytes: int


def describe(entry: Entry) -> Description:
    """The entry's description."""
    return Description(
        entry.key, entry.step, entry.length, entry.prompt_length, entry.reward, entry.width, entry.nbytes
    )


def to_bytes(entry: Entry) -> bytes:
    """Serialize an entry into the content of its file."""
    description = json.dumps(describe(entry).__dict__).encode()
    body = description + save({name: tensor.contiguous().cpu() for name, tensor in entry.tensors().items()})
    return _PREFIX.pack(_MAGIC, zlib.crc32(body), len(description)) + body


def _described(data: Any, size: int) -> tuple[Description, int, int]:
    """Parse (description, CRC-32, offset of the tensors) from ``data``, the first bytes of a file of ``size`` bytes."""
    try:
        magic, crc, length = _PREFIX.unpack_from(data)
        if magic != _MAGIC:
            raise DamagedEntry("it does not start with a drafter entry's header")
        fields = json.loads(bytes(data[_PREFIX.size : _PREFIX.size + length]))
        description = Description(**fields)
    except (struct.error, ValueError, TypeError) as error:
        raise DamagedEntry(f"its header cannot be read: {error}") from error
    if not isinstance(description.nbytes, int) or size > description.nbytes:
        raise DamagedEntry(f"it has {size} bytes, its header allows {description.nbytes}")
    return description, crc, _PREFIX.size + length


def read_description(path: Path) -> Description:
    """Read the description in a file without its tensors.

    Raises:
        DamagedEntry: the file cannot be read or is not an entry.
    """
    try:
        with open(path, "rb") as file:
            return _described(file.read(ENTRY_OVERHEAD_BYTES), path.stat().st_size)[0]
    except OSError as error:
        raise DamagedEntry(f"it cannot be read: {error}") from error


def read_entry(path: Path) -> Entry:
    """Read the entry in a file through a memory map, and verify all of its bytes.

    Raises:
        DamagedEntry: the file cannot be read, is truncated, or differs from what was written.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            description, crc, start = _described(data, len(data))
            with memoryview(data) as view, view[_PREFIX.size :] as body:
                if zlib.crc32(body) != crc:
                    raise DamagedEntry("its bytes are not those that were written")
            tensors = load(data[start:])
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedEntry(f"it cannot be read: {error}") from error
    return Entry(
        description.key,
        description.step,
        tensors["token_ids"],
        description.prompt_length,
        tensors["hidden"],
        description.reward,
    )
