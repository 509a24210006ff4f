"""When a launch starts its ranks again: after a killed rank, a bounded number of times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from megatron_tlt.cli.worker import WorkerError
from megatron_tlt.platform.deaths import Death
from megatron_tlt.platform.membership import RoundEnd

Progress = Callable[[], tuple[int, int]]
"""Returns the steps done and the newest checkpoint's step."""


@dataclass(frozen=True)
class EndedStart:
    """How one torchrun ended: its status, the first rank killed by a signal, the error to show.

    ``obsolete``: other nodes had left it for the next start.
    """

    code: int
    death: Death | None
    error: WorkerError | None
    obsolete: bool = False


class Restarts:
    """Decides whether a launch restarts after a killed rank, and reports the reason.

    Where nodes may change, launchers read the figures to decide with (``adopt``). The steps done each reads for itself,
    maybe a row earlier than another one; so the first one that has ``refused`` ends the launch for all.
    """

    def __init__(
        self, most: int, progress: Progress, log: IO[bytes] | None, has_snapshots: bool, is_elastic: bool
    ) -> None:
        self._most, self._progress, self._log, self._has_snapshots = most, progress, log, has_snapshots
        self._is_elastic = is_elastic
        self._count = 0
        self._done: int | None = None  # steps done at the last death
        self.end = RoundEnd()
        """Of the newest start that ended."""
        self.refused = False
        """Whether lost ranks were not a reason to restart any more."""

    def adopt(self, count: int | None, failed_after: int | None) -> None:
        """Takes what the launchers have agreed on, if they have, in place of what this one has seen.

        Args:
            count: restarts so far; None: launchers do not agree on them.
            failed_after: steps that were done when ranks were lost last, if that counts.
        """
        if count is not None:
            self._count, self._done = count, failed_after

    def allow(self, ended: EndedStart) -> bool:
        """Whether all ranks start again after this end."""
        error = ended.error
        if error is not None and error.exit_status > 1:
            return False  # the request is invalid, or a stop was requested
        # nodes that did not meet leave no error; an obsolete start was ended by its launcher
        lost = ended.death is not None or ended.obsolete or (error is not None and error.ranks_lost)
        lost |= self._is_elastic and error is None and ended.code != 0
        if error is not None and error.nodes_change:
            self._say(f"{error.message}; all ranks restart")
            self.end = RoundEnd(nodes_change=True)
            return True
        if not lost:
            return False
        done, saved = self._progress()
        cause = "ranks of other nodes were lost"
        if ended.death is not None and not (ended.obsolete and ended.death.rank is None):
            cause = str(ended.death)
        elif error is not None:
            cause = error.message
        what, again = f"{cause} in step {done + 1}", done == self._done
        self._done, self.end = done, RoundEnd(failed_after=done)
        if not self._most:
            return False
        # a launcher that has entered the next start knows why, and has counted alike
        if again and not ended.obsolete:
            self._say(f"{what}, as before: not restarted")
            self.refused = True
            return False
        if self._count == self._most and not ended.obsolete:
            self._say(f"{what}; launcher.max_restarts, {self._most}, is used up: not restarted")
            self.refused = True
            return False
        self._count = min(self._count + 1, self._most)
        start = f"the checkpoint of step {saved}" if saved else "step 0"
        start = f"the newest snapshot in memory, else {start}" if self._has_snapshots else start
        self._say(f"{what}; all ranks restart from {start} (restart {self._count} of {self._most})")
        return True

    @property
    def are_left(self) -> bool:
        """Whether a rank that is killed now leads to a restart, if its step has not failed before."""
        return self._count < self._most

    def _say(self, line: str) -> None:
        print(f"warning: {line}", file=sys.stderr, flush=True)
        if self._log is not None:
            self._log.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode())
            self._log.flush()
