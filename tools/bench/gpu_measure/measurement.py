"""What a part consists of, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What all measurements of a file share; lines of other settings are not combined with them.

    ``small``: rehearsal shapes, which meet no target. ``lean``: fewer points and an eighth of the response lengths,
    for a machine that is lent for minutes. ``device`` is "cuda" or "cpu".
    """

    small: bool
    device: str
    device_name: str
    lean: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the process has a GPU."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Measurement:
    """One process: ``function`` ("module:name" of this package) gets ``given`` and emits rows.

    ``expected_s``: duration on the slowest supported GPU; a call that has less time left does not start it.
    """

    name: str
    function: str
    given: dict[str, Any] = field(default_factory=dict)
    expected_s: float = 120.0
