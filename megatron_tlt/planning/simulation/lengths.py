"""Response lengths: a recorded trace, or a long-tailed distribution fitted to one; both truncated at a maximum."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.errors import ConfigError

Array = NDArray[np.float64]
_erf = np.frompyfunc(math.erf, 1, 1)  # scipy's would be a large dependency for one function
_LENGTHS_FILE = "lengths.jsonl"
_FORMS = (
    "a JSON list of numbers, JSON lines of numbers, of {lengths: [...]} or of {length: n} or {token_ids: [...]}, "
    "what tools/record_lengths.py writes, or a run's folder"
)


class LengthDistribution(Protocol):
    """A distribution of response lengths."""

    def at(self, normal: Array, longest: float) -> Array:
        """Tokens, integer and from 1 to ``longest``, for values of a standard normal variable."""


@dataclass(frozen=True)
class LongTail:
    """Log-normal distribution; longer values are truncated at the longest, as in a rollout."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""

    def at(self, normal: Array, longest: float) -> Array:
        tokens = np.exp(np.log(self.median) + self.sigma * normal)
        return np.clip(np.ceil(tokens), 1.0, longest)


@dataclass(frozen=True)
class Recorded:
    """Recorded lengths, sorted."""

    tokens: tuple[float, ...]

    def at(self, normal: Array, longest: float) -> Array:
        below = 0.5 + 0.5 * np.asarray(_erf(normal / math.sqrt(2.0)), dtype=np.float64)
        at = np.minimum((below * len(self.tokens)).astype(np.intp), len(self.tokens) - 1)
        return np.clip(np.asarray(self.tokens)[at], 1.0, longest)


def fit_long_tail(tokens: Sequence[float], longest: float) -> LongTail:
    """Maximum-likelihood fit; responses of ``longest`` or more are treated as censored.

    Raises:
        ConfigError: fewer than two different lengths below ``longest``.
    """
    from scipy.stats import CensoredData, lognorm

    values = np.asarray(tokens, dtype=np.float64)
    whole = values[values < longest]
    if len(np.unique(whole)) < 2:
        raise ConfigError(f"lengths: found {len(values)}, of which {len(np.unique(whole))} differ; allowed: 2 and more")
    data = CensoredData(uncensored=whole, right=np.full(len(values) - len(whole), float(longest)))
    sigma, _, median = lognorm.fit(data, floc=0)
    return LongTail(float(median), float(sigma))


def draw(rng: np.random.Generator, groups: int, size: int, correlation: float) -> Array:
    """(groups, size) standard normal variables; those of a group share a common part."""
    shared = rng.standard_normal((groups, 1))
    own = rng.standard_normal((groups, size))
    return np.asarray(np.sqrt(correlation) * shared + np.sqrt(1.0 - correlation) * own)


def read_lengths(path: Path) -> Recorded:
    """Reads a trace; raises ConfigError if it is unreadable or contains no lengths."""
    file = path / _LENGTHS_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--lengths: cannot read {file}: {error.strerror or error}; allowed: {_FORMS}") from error
    try:
        rows = json.loads(text)
        rows = rows if isinstance(rows, list) else [rows]
    except ValueError:
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"--lengths: {file} is not JSON: {error}; allowed: {_FORMS}") from error
    tokens = sorted(value for row in rows for value in _of_row(row))
    if not tokens or tokens[0] < 1:
        found = f"{len(tokens)} lengths" + (f", the least {tokens[0]:g}" if tokens else "")
        raise ConfigError(f"--lengths: {file}: found {found}; allowed: {_FORMS}, each at least 1")
    return Recorded(tuple(tokens))


def _of_row(row: Any) -> list[float]:
    if isinstance(row, dict):
        for key in ("lengths", "length", "rollouts"):
            if key in row:
                return _of_row(row[key])
        ids = row.get("token_ids")
        return [float(len(ids))] if isinstance(ids, list) else []
    if isinstance(row, list):
        return [value for entry in row for value in _of_row(entry)]
    return [float(row)] if isinstance(row, (int, float)) and not isinstance(row, bool) else []
