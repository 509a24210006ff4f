"""Uniform random numbers for drafts: a pure function of a request's seed and a token's position.

A draft then does not depend on other requests, or on how often a position was drafted. Reuse at a position is valid:
its number does not influence the response before a draft at this position is verified, and a verified position is not
drafted again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STREAM = np.uint64(0xD1B54A32D192ED03)  # separates these numbers from other uses of the same seeds
_TO_UNIT = 2.0**-53


def _mix(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def draft_uniforms(
    seeds: np.ndarray[Any, np.dtype[np.uint64]], positions: np.ndarray[Any, np.dtype[np.uint64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers in [0, 1), one per row: seeds (rows), positions (rows) -> (rows)."""
    state = _mix(seeds ^ _STREAM) + (positions + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * _TO_UNIT
