"""Common start of every process of a launch, and error reporting to the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt.config.loader import load_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, NodesChange, RanksLost, RunRefused, TltError
from megatron_tlt.platform import lost_ranks
from megatron_tlt.platform.deaths import ERROR_FOLDER
from megatron_tlt.platform.processes import RANK_NAME, die_with_parent, name_thread

LOG_FOLDER = "TLT_LOG_DIR"
"""If set, each rank writes to its own file in this folder; rank 0's standard output is unchanged."""
_CAUSE_FIRST_S = 1.0
"""Delay before a rank with a broken connection exits; torchrun polls its ranks every 0.1 s, more slowly under load."""
STOPPED = "stopped"
NOTHING_SAVED = "stopped by {} before there was anything to save"


@dataclass(frozen=True)
class WorkerError:
    """Why one rank failed; ``traceback`` is empty for an error meant for the user.

    ``ranks_lost``: this rank did not fail, but ranks of other nodes no longer answer. ``nodes_change``: nor did any
    other, and nodes wait for a place.
    """

    rank: int
    message: str
    exit_status: int
    traceback: str
    time: float
    ranks_lost: bool = False
    nodes_change: bool = False


def write_error(error: BaseException, exit_status: int) -> None:
    """Writes the error to the launch's folder, if there is one; never raises over the error itself."""
    folder = os.environ.get(ERROR_FOLDER)
    if not folder:
        return
    expected = isinstance(error, TltError)
    rank = int(os.environ.get("RANK", "0"))
    trace = "" if expected else "".join(traceback.format_exception(error))
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    lost, returned = isinstance(error, RanksLost), isinstance(error, NodesChange)
    record = WorkerError(rank, message, exit_status, trace, time.time(), lost, returned)
    with contextlib.suppress(OSError):
        temporary = Path(folder, f".rank{rank}.json.tmp")
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        temporary.rename(Path(folder, f"rank{rank}.json"))


def read_first_error(folder: Path) -> WorkerError | None:
    """The error to show: the first one meant for the user, else the first of all.

    When one rank fails, the collectives of the others also fail: their errors are not the cause.
    """
    return min(_errors(folder, "rank*.json"), key=lambda e: (bool(e.traceback), e.time), default=None)


def has_reported(folder: Path, rank: int) -> bool:
    """Whether this rank has reported an error meant for the user, other than that ranks are lost."""
    return any(not error.traceback and not error.ranks_lost for error in _errors(folder, f"rank{rank}.json"))


def _errors(folder: Path, pattern: str) -> list[WorkerError]:
    errors = []
    for file in folder.glob(pattern):
        with contextlib.suppress(OSError, ValueError, TypeError):
            errors.append(WorkerError(**json.loads(file.read_text(encoding="utf-8"))))
    return errors


def _log_to_own_file() -> None:
    folder, rank = os.environ.get(LOG_FOLDER), os.environ.get("RANK")
    if not folder or rank is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with Path(folder, f"rank{int(rank):05d}.log").open("ab") as log:
        os.dup2(log.fileno(), 2)
        if int(rank):
            os.dup2(log.fileno(), 1)


def _mark_stopped() -> None:
    """Tells the job script that the run was asked to stop, and that its progress is saved."""
    folder = os.environ.get(LOG_FOLDER)
    if folder and os.environ.get("RANK") == "0":
        with contextlib.suppress(OSError):
            Path(folder, STOPPED).touch()


def run_guarded(main: Callable[[], None]) -> int:
    """Runs one rank's work, reports its error to the process that launched it, and returns the exit status."""
    # The launcher of this process is torchrun; only it can end the whole run.
    die_with_parent(signal.SIGKILL)
    lost_ranks.how_to_end = _end_with
    if "RANK" in os.environ:
        name_thread(f"{RANK_NAME}{os.environ['RANK']}")
    try:
        _log_to_own_file()
        main()
        _leave()
    except TltError as error:
        _after_broken_line(error)
        write_error(error, error.exit_status)
        if error.exit_status > 128:
            _mark_stopped()
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, RunRefused | NodesChange):  # no rank waits for another one
            _leave()
        return error.exit_status
    except KeyboardInterrupt:
        write_error(TltError(NOTHING_SAVED.format(signal.SIGINT.name)), 128 + signal.SIGINT)
        return 128 + signal.SIGINT
    except Exception as error:
        _after_broken_line(error)
        write_error(error, 1)
        traceback.print_exc()
        return 1
    return 0


def _leave() -> None:
    """Ends the process group after the last collective of all ranks."""
    if "torch.distributed" in sys.modules:  # a worker without torch has no process group
        from megatron_tlt.platform.device import leave_distributed

        leave_distributed()


def _after_broken_line(error: Exception) -> None:
    """After a broken connection to other nodes: reports the missing ranks and ends the process.

    After one within a node: lets torchrun and the launcher see the rank that caused it first. A killed rank closes its
    connections before its parent detects its end. The error is written after the wait: the launcher gives torchrun a
    limited time from then on.
    """
    if "torch.distributed" not in sys.modules:  # a worker without torch has no such connection
        return
    lost = lost_ranks.name_the_lost(error)
    if lost is not None:
        traceback.print_exception(error)
        lost_ranks.end_once(lost, _end_with)
    if lost_ranks.is_broken_line(error):
        time.sleep(_CAUSE_FIRST_S)


def _end_with(error: RanksLost) -> None:
    """Ends the process at once: threads that still wait for the network would block a normal exit."""
    write_error(error, error.exit_status)
    print(f"error: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_status)


def run_worker(main: Callable[[TltConfig], None], argv: Sequence[str] | None = None) -> int:
    """Loads the resolved config named by the single argument, runs ``main``, and returns the exit status.

    A worker module ends with ``sys.exit(run_worker(main))``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def run() -> None:
        if len(arguments) != 1:
            raise ConfigError(f"a worker takes one argument, the resolved config's path; found {arguments!r}")
        main(load_resolved(arguments[0]))

    return run_guarded(run)
