"""How a run is asked to stop, and the error with which it then ends."""

from __future__ import annotations

import signal
from types import FrameType

from megatron_tlt.errors import TltError


class Interrupted(TltError):
    """A signal requested a stop; the state is saved."""

    def __init__(self, signum: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}")
        self.exit_status = 128 + signum


class StopFlag:
    """Records the first SIGINT or SIGTERM; cheap to poll."""

    def __init__(self) -> None:
        self.signum: int | None = None
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    def __call__(self) -> bool:
        return self.signum is not None
