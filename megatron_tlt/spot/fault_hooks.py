"""Hooks for fault tests: record the messages that were sent, and hold the coordinator on request.

Both use the folder that the environment variable ``TLT_SPOT_FAULTS`` names. Without it they do nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

VARIABLE = "TLT_SPOT_FAULTS"
HOLD = "hold"
"""While the folder has a file of this name, the coordinator pauses."""


class FaultHooks:
    """Hooks of one message sender; ``kind`` is ``report`` or ``directive``, the prefix of its file's name."""

    def __init__(self, kind: str) -> None:
        folder = os.environ.get(VARIABLE)
        self._folder = Path(folder) if folder else None
        self._name = f"{kind}-{os.getpid()}"

    def sent(self, frames: Sequence[bytes]) -> None:
        """Append the frames of a message to the sender's file, as a line of hexadecimal numbers."""
        if self._folder is not None:
            with (self._folder / self._name).open("a") as file:
                file.write(" ".join(frame.hex() for frame in frames) + "\n")

    def hold(self, is_closing: Callable[[], bool]) -> None:
        """Wait until the folder has no file ``hold``, or the coordinator closes."""
        while self._folder is not None and (self._folder / HOLD).exists() and not is_closing():
            time.sleep(0.05)
