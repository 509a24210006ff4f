"""How the ranks of a launch ended, as torchrun saw it: whoever started it learns which one a signal ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FAILURES = "TLT_FAILURES_FILE"
# What ends a run on purpose: a pre-emption, Ctrl-C, or torchrun itself when another rank has failed.
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# torchrun asks the other ranks to end, and kills them 30 s later; its times are whole seconds.
_TOGETHER_S = 2


@dataclass(frozen=True)
class Failure:
    """How one rank ended: ``status`` is its exit status, or minus the signal; ``time`` a Unix time in seconds."""

    rank: int
    status: int
    time: int


@dataclass(frozen=True)
class Death:
    """A rank (None: torchrun itself) that a signal ended which nobody sends to stop a run: SIGKILL, SIGSEGV."""

    rank: int | None
    signum: int

    def __str__(self) -> str:
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        try:
            name = signal.Signals(self.signum).name
        except ValueError:
            name = f"signal {self.signum}"
        return f"{who} was ended by {name}"


def first_death(failures: list[Failure], torchrun_status: int) -> Death | None:
    """The rank whose death ended the launch, if one's did; ``failures`` as torchrun saw them, in that order."""
    if not failures:
        died = torchrun_status < 0 and -torchrun_status not in _ASKED
        return Death(None, -torchrun_status) if died else None
    began = min(failure.time for failure in failures)
    for failure in failures:
        if failure.status < 0 and -failure.status not in _ASKED and failure.time <= began + _TOGETHER_S:
            return Death(failure.rank, -failure.status)
    return None


def read_failures(file: Path) -> list[Failure]:
    """What :func:`failures_recorded` left; nothing where no rank failed."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [Failure(**item) for item in json.loads(file.read_text(encoding="utf-8"))]
    return []


@contextlib.contextmanager
def failures_recorded() -> Iterator[None]:
    """Around torchrun: leaves the failures that it ends with in the file that ``TLT_FAILURES_FILE`` names, if any."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        yield
    except ChildFailedError as error:
        file = os.environ.get(FAILURES)
        if file:
            found = [Failure(rank, one.exitcode, one.timestamp) for rank, one in error.failures.items()]
            with contextlib.suppress(OSError):
                Path(file).write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
        raise
