"""The section ``rewards``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_tlt.config.section import PositiveInt, Section

LEAST_ADAPTIVE_S = 2.0
"""Seconds that ``adaptive_timeout`` leaves to every verdict (RollPacker, arXiv:2509.21009, section 4.3)."""


class RewardConfig(Section):
    """The process pool that verifies responses during decoding.

    With ``adaptive_timeout``, a problem that has a correct response gives others 1.5 times the seconds of the slowest
    correct one, at least 2 s and at most ``timeout_s``, which has to be above that; after that they are wrong. It is
    for verifiers that run programs.
    """

    workers: PositiveInt = 1
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    adaptive_timeout: bool = False
