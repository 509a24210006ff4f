"""Prompts with responses for an offline warm-up: read from a JSON lines file, checked, and stored as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.jsonl import dumps
from megatron_tlt.platform.files import atomic_write_text


@dataclass(frozen=True)
class Pair:
    """A prompt and a response of the target, as token ids."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


def read_pairs(path: Path, vocab_size: int, tokenizer: Callable[[], Tokenizer]) -> list[Pair]:
    """Read the pairs of a file; each line is a JSON object with ``prompt`` and ``response``, as text or token ids.

    The end-of-sequence token is appended to a text response. ``tokenizer`` is called only if there is text.

    Raises:
        ConfigError: the file or a line cannot be read; names the line, the key, the value and what is allowed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    loaded: list[Tokenizer] = []

    def ids(where: str, value: Any, end: bool) -> tuple[int, ...]:
        if isinstance(value, str):
            loaded[:] = loaded or [tokenizer()]
            value = loaded[0].encode(value) + ([loaded[0].eos_id] if end else [])
        whole = isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
        if not whole or not value:
            raise ConfigError(f"{where} is {str(value)[:60]!r}; allowed: text or a list of token ids, not empty")
        if not 0 <= min(value) <= max(value) < vocab_size:
            raise ConfigError(f"{where} has token ids {min(value)} to {max(value)}; allowed: 0 to {vocab_size - 1}")
        return tuple(value)

    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {line[:60]!r}") from error
        if not isinstance(row, dict) or not {"prompt", "response"} <= row.keys():
            raise ConfigError(f"{where}: found {line[:60]!r}; needed: an object with prompt and response")
        prompt = ids(f"{where}: prompt", row["prompt"], False)
        pairs.append(Pair(prompt, ids(f"{where}: response", row["response"], True)))
    if not pairs:
        raise ConfigError(f"{path}: no line in it; allowed: at least one prompt with its response")
    return pairs


def write_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """Write token ids in the format of :func:`read_pairs`.

    Raises:
        RunError: the disk is full.
    """
    atomic_write_text(path, "".join(dumps({"prompt": p.prompt, "response": p.response}) + "\n" for p in pairs))


def digest_of(pairs: Sequence[Pair]) -> str:
    """A digest of these pairs in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for pair in pairs:
        digest.update(json.dumps([pair.prompt, pair.response]).encode())
    return digest.hexdigest()
