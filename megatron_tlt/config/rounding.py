"""Whole numbers from factors of the config."""

from __future__ import annotations

import math

_ROUNDING = 1e-12
"""Relative; several times the error of a product of two floats."""


def times_at_least(factor: float, count: int) -> int:
    """``factor`` times ``count``, rounded up; pure.

    1.1 times 100 is 110, although the product of the floats is a little more.
    """
    return math.ceil(factor * count * (1 - _ROUNDING))
