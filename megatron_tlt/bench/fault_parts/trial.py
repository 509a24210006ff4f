"""What a trial of a fault is, and how it fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Trial = Callable[[random.Random, Path], None]
"""Does one fault in an empty folder, and checks what the part makes of it."""

Part = Mapping[str, Trial]
"""The faults of a part by name."""


class Broken(Exception):
    """A part did not keep its promise under a fault."""


class NotPossible(Exception):
    """The fault cannot be made on this machine."""


def check(condition: object, problem: str) -> None:
    """Raises Broken with ``problem`` unless ``condition`` holds."""
    if not condition:
        raise Broken(problem)


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Waits for ``condition``; raises Broken if ``what`` does not happen within ``limit_s``."""
    end = time.monotonic() + limit_s
    while not condition():
        check(time.monotonic() < end, f"{what} did not happen within {limit_s:g} s")
        time.sleep(0.005)
