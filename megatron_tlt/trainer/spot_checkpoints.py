"""The checkpoints of drafter training inside bubbles: its leader writes them, whoever leads next starts from them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_tlt.checkpoint.files import LATEST
from megatron_tlt.drafter import DrafterTrainer
from megatron_tlt.drafter.checkpoint import KIND, payload_of, state_of
from megatron_tlt.drafter.state import DrafterState
from megatron_tlt.errors import TltError
from megatron_tlt.spot import SelectiveCheckpointer, newest

logger = logging.getLogger(__name__)

_KEEP = 2
_POLL_S = 0.02


class SpotCheckpoints:
    """One rank's side of them; its thread and memory come with its first save.

    One rank writes at a time: who led is ``idle`` before it enters a session that another leads.

    Args:
        folder: of these checkpoints alone, the same on all ranks.
        every: steps between two saves.
    """

    def __init__(self, folder: Path, every: int, trainer: DrafterTrainer) -> None:
        self._folder, self._every, self._trainer = folder, every, trainer
        self._checkpointer: SelectiveCheckpointer | None = None
        self._saved: int | None = None

    def step_done(self, rl_step: int) -> None:
        """The leader has trained a step: saves where that is due."""
        if self._trainer.version - (self._saved or 0) >= self._every:
            self.save(rl_step)

    def save(self, rl_step: int) -> None:
        """Saves the trainer's state of now, unless that is saved; a disk that is full is a warning."""
        version = self._trainer.version
        if version == self._saved:
            return
        if self._checkpointer is None:
            self._checkpointer = SelectiveCheckpointer(self._folder, _KEEP)
        self._checkpointer.save(version, payload_of(self._trainer.state, {"step": rl_step}))
        self._saved = version

    def idle(self) -> bool:
        """Whether nothing of this rank's is being written."""
        return self._checkpointer is None or self._checkpointer.wait(0.0)

    @property
    def failed(self) -> int:
        """Saves of this rank that did not reach the disk."""
        return 0 if self._checkpointer is None else self._checkpointer.counts.failed

    def take_over(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Loads the newest checkpoint where it is newer than the trainer's state; whether it was.

        Reading goes on beside, and ``should_stop`` ends the wait for it. What cannot be read is a warning.
        """
        latest = self._latest_version()
        if latest is None or latest <= self._trainer.version:
            return False
        read: list[DrafterState] = []

        def look() -> None:
            try:
                found = newest(self._folder, KIND)
                if found is not None:
                    read.append(state_of(found.payload)[0])
            except TltError as error:
                logger.warning("the newest drafter was not taken over: %s", error)

        reader = threading.Thread(target=look, name="spot-take-over", daemon=True)
        reader.start()
        while reader.is_alive():
            if should_stop():
                return False
            reader.join(_POLL_S)
        if not read or read[0].version <= self._trainer.version:
            return False
        self._trainer.load_state(read[0])
        self._saved = self._trainer.version
        return True

    def _latest_version(self) -> int | None:
        try:
            name = (self._folder / LATEST).read_text(encoding="utf-8").strip()
            return int(name.rpartition("-")[2])
        except (OSError, ValueError):  # none there; a damaged one is no reason to stop either
            return None

    def close(self, timeout_s: float) -> None:
        """Waits for the write in flight, ``timeout_s`` at most."""
        if self._checkpointer is not None:
            self._checkpointer.close(timeout_s)
