"""Exit statuses of a launch's ranks as torchrun reports them, and the rank that a signal killed first."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FAILURES = "TLT_FAILURES_FILE"
ERROR_FOLDER = "TLT_ERROR_FILE"
"""Folder in which each rank writes its error, ``rank3.json``."""
# Signals that stop a run on purpose: pre-emption, Ctrl-C, or torchrun itself after another rank has failed.
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# torchrun terminates the other ranks and kills them after 30 s; its timestamps are whole seconds.
_TOGETHER_S = 2
ENDS_LATE = "if a signal kills a rank, the others end up to 30 s later"
"""Begins a warning on standard error with the reason."""
# What kill_others_at_once uses of torch's SubprocessContext.
_ATTRIBUTES, _CLOSE = ("_failures", "envs"), ["self", "death_sig", "timeout"]


@dataclass(frozen=True)
class Failure:
    """How one rank ended: ``status`` is its exit status or minus its signal; ``time`` is Unix time in seconds."""

    rank: int
    status: int
    time: int


@dataclass(frozen=True)
class Death:
    """A rank (None: torchrun itself) killed by a signal that is not used to stop a run, such as SIGKILL or SIGSEGV."""

    rank: int | None
    signum: int

    def __str__(self) -> str:
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        try:
            name = signal.Signals(self.signum).name
        except ValueError:
            name = f"signal {self.signum}"
        return f"{who} was killed by {name}"


def first_death(failures: list[Failure], torchrun_status: int) -> Death | None:
    """The rank whose death ended the launch, or None; ``failures`` are in the order in which torchrun reports them."""
    if not failures:
        died = torchrun_status < 0 and -torchrun_status not in _ASKED
        return Death(None, -torchrun_status) if died else None
    began = min(failure.time for failure in failures)
    for failure in failures:
        if failure.status < 0 and -failure.status not in _ASKED and failure.time <= began + _TOGETHER_S:
            return Death(failure.rank, -failure.status)
    return None


def read_failures(file: Path) -> list[Failure]:
    """The failures that :func:`failures_recorded` wrote; empty if no rank failed."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [Failure(**item) for item in json.loads(file.read_text(encoding="utf-8"))]
    return []


def kill_others_at_once() -> None:
    """Has torchrun kill all ranks of a single node once a signal has killed one; it would let them go on for 30 s.

    They may notice that it has gone only when their rollout ends. Several nodes have that time: their ranks find out
    which ones are lost. So have those that were left by a rank that was killed after it had reported its error.
    Where torch's interface is another one, a warning says so, and the ranks have that time too.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    if reason := _differs(SubprocessContext):
        print(f"warning: {ENDS_LATE}: {reason}", file=sys.stderr, flush=True)
        return
    close = SubprocessContext.close

    def close_at_once(context: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        killed = [rank for rank, one in context._failures.items() if one.exitcode < 0 and -one.exitcode not in _ASKED]
        alone = all(env.get("GROUP_WORLD_SIZE") == "1" for env in context.envs.values())
        reported = os.environ.get(ERROR_FOLDER, "")
        if death_sig is None and alone and killed and not any(Path(reported, f"rank{n}.json").exists() for n in killed):
            death_sig = signal.SIGKILL
        close(context, death_sig, timeout)

    setattr(SubprocessContext, "close", close_at_once)  # noqa: B010


def _differs(context: type) -> str:
    """What :func:`kill_others_at_once` uses of this class of torch and does not find; empty if all is there."""
    codes = [getattr(vars(kind).get("__init__"), "__code__", None) for kind in context.__mro__]
    set_by_init = {name for code in codes if code is not None for name in code.co_names}
    if lacking := [name for name in _ATTRIBUTES if name not in set_by_init]:
        return f"torch's {context.__name__} has no {', no '.join(lacking)}"
    found = list(inspect.signature(getattr(context, "close", _differs)).parameters)
    return "" if found == _CLOSE else f"torch's {context.__name__}.close takes {found}, needed: {_CLOSE}"


@contextlib.contextmanager
def failures_recorded() -> Iterator[None]:
    """Writes the failures that torchrun raises to the file named by ``TLT_FAILURES_FILE``, if that is set."""
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
