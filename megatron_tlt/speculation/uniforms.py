"""Uniform random numbers for tokens: a pure function of a request's seed, a token's position and a use.

A token then does not depend on other requests, or on how often a position was drafted or verified. Reuse at a position
is valid: its numbers do not influence the response before a token at this position is final, and then none is drawn
there again.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-53


class Use(Enum):
    """What a number decides; numbers of different uses are independent."""

    DRAFT = 0xD1B54A32D192ED03
    VERIFY = 0xABC98388FB8FAC03
    """Whether a draft token is accepted."""
    REPLACE = 0x8CB92BA72F3D8DD7
    """The token in place of a rejected one."""
    TARGET = 0xF1357AEA2E62A9C5
    """A token of the target model without a draft."""


def _mix(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def uniforms(
    use: Use, seeds: np.ndarray[Any, np.dtype[np.uint64]], positions: np.ndarray[Any, np.dtype[np.uint64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers in [0, 1), one per row: seeds (rows), positions (rows) -> (rows)."""
    state = _mix(seeds ^ np.uint64(use.value)) + (positions + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * _TO_UNIT
