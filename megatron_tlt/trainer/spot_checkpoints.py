"""Checkpoints of the spot trainer: a session's leader writes them, and the next leader starts from the newest."""

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
    """One rank's checkpoint writer and reader; its thread is there from the start, its memory from the first save.

    One rank writes at a time: a former leader enters another leader's session only when it is ``idle``.

    Args:
        folder: contains these checkpoints only; the same on all ranks.
        every: steps between two saves.
    """

    def __init__(self, folder: Path, every: int, trainer: DrafterTrainer) -> None:
        self._folder, self._every, self._trainer = folder, every, trainer
        self._checkpointer = SelectiveCheckpointer(folder, _KEEP)
        self._saved: int | None = None

    def step_done(self, rl_step: int) -> None:
        """Counts a step of the leader, and saves if a save is due."""
        if self._trainer.version - (self._saved or 0) >= self._every:
            self.save(rl_step)

    def save(self, rl_step: int) -> None:
        """Saves the trainer's current state unless it is saved already; a failure, as on a full disk, is a warning."""
        version = self._trainer.version
        if version == self._saved:
            return
        self._checkpointer.save(version, payload_of(self._trainer.state, {"step": rl_step}))
        self._saved = version

    def idle(self) -> bool:
        """Whether this rank has no write in progress."""
        return self._checkpointer.wait(0.0)

    @property
    def failed(self) -> int:
        """Number of failed saves of this rank."""
        return self._checkpointer.counts.failed

    def take_over(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Loads the newest checkpoint if it is newer than the trainer's state; returns whether it was.

        A thread reads it, and ``should_stop`` ends the wait for that thread. A read failure is a warning.
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
                logger.warning("the newest drafter checkpoint was not loaded: %s", error)

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
        except (OSError, ValueError):  # missing or damaged
            return None

    def close(self, timeout_s: float) -> None:
        """Waits for the write in progress, for ``timeout_s`` at most."""
        self._checkpointer.close(timeout_s)
