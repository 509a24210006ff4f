"""File format of a suffix drafter's responses: only tokens, since trees are quickly rebuilt.

``TLTSUFX`` and a version digit, the payload's SHA-256, the payload: safetensors with all tokens in one tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import atomic_write_bytes
from megatron_tlt.speculation.suffix_store import StoredResponse
from megatron_tlt.speculation.suffix_tree import MAX_TOKEN, Tokens

_MAGIC = b"TLTSUFX"
_VERSION = b"2"
_HEADER = len(_MAGIC) + len(_VERSION) + hashlib.sha256().digest_size


class OtherVersion(RunError):
    """The file has another release's format."""


def write_responses(path: Path | str, responses: Iterable[StoredResponse]) -> None:
    """Write a temporary file and rename it. Only the sequence of the responses is kept of ``StoredResponse.order``.

    Raises:
        RunError: the disk is full or the path cannot be written.
    """
    stored = list(responses)
    problems = {problem: i for i, problem in enumerate(dict.fromkeys(entry.problem for entry in stored))}
    arrays = {
        "problem": np.array([problems[entry.problem] for entry in stored], np.int32),
        "visit": np.array([entry.visit for entry in stored], np.int32),
        "length": np.array([len(entry.tokens) for entry in stored], np.int64),
        "tokens": np.concatenate([np.empty(0, np.int32), *(entry.tokens for entry in stored)]),
    }
    # the names are a tensor too, so that checking the payload checks everything
    arrays["names"] = np.frombuffer(json.dumps(list(problems)).encode(), np.uint8)
    payload = save(arrays)
    atomic_write_bytes(path, _MAGIC + _VERSION + hashlib.sha256(payload).digest() + payload)


def read_responses(path: Path | str) -> list[tuple[str, int, Tokens]]:
    """Read problem, visit and tokens of all responses.

    Raises:
        OtherVersion: the file has another version.
        RunError: the file cannot be read, is of another kind, or is damaged.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    if not data.startswith(_MAGIC):
        raise RunError(f"{path}: not a suffix drafter's file, it begins with {data[: len(_MAGIC)]!r}")
    version = data[len(_MAGIC) : len(_MAGIC) + len(_VERSION)]
    if version != _VERSION:
        raise OtherVersion(f"{path}: version {version!r} of a suffix drafter's file; allowed: {_VERSION!r}")
    payload = data[_HEADER:]
    if hashlib.sha256(payload).digest() != data[_HEADER - hashlib.sha256().digest_size : _HEADER]:
        raise RunError(f"{path}: damaged or cut short, its {len(payload)} bytes do not match their checksum")
    try:
        return _parse(payload)
    except (SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"{path}: matches its checksum, but holds no responses: {error}") from error


def _parse(payload: bytes) -> list[tuple[str, int, Tokens]]:
    arrays = load(payload)
    problems = json.loads(arrays["names"].tobytes())
    tokens, lengths = arrays["tokens"], arrays["length"]
    if lengths.min(initial=0) < 0 or int(lengths.sum()) != len(tokens):
        raise ValueError(f"lengths add up to {lengths.sum()}, there are {len(tokens)} tokens")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= MAX_TOKEN:
        raise ValueError(f"tokens from {tokens.min()} to {tokens.max()}; allowed: 0 to {MAX_TOKEN}")
    ends = np.cumsum(lengths)
    rows = zip(arrays["problem"], arrays["visit"], ends - lengths, ends, strict=True)
    return [(problems[i], int(visit), tokens[a:b].copy()) for i, visit, a, b in rows]
