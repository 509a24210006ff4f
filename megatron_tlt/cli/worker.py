"""What every process of a launch begins with, and how its error reaches the process that started it."""

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
from megatron_tlt.errors import ConfigError, RanksLost, TltError
from megatron_tlt.platform import lost_ranks
from megatron_tlt.platform.processes import die_with_parent

ERROR_FOLDER = "TLT_ERROR_FILE"
LOG_FOLDER = "TLT_LOG_DIR"
"""Where this is set, each rank writes to a file of its own there; rank 0's standard output stays where it is."""
STOPPED = "stopped"
NOTHING_SAVED = "stopped by {} before there was anything to save"


@dataclass(frozen=True)
class WorkerError:
    """Why one rank failed: ``traceback`` is empty for an error meant for the user.

    ``ranks_lost``: nothing is wrong here, but ranks of other nodes do not answer any more.
    """

    rank: int
    message: str
    exit_status: int
    traceback: str
    time: float
    ranks_lost: bool = False


def write_error(error: BaseException, exit_status: int) -> None:
    """Leaves the error in the launch's folder, where there is one; never raises over the error itself."""
    folder = os.environ.get(ERROR_FOLDER)
    if not folder:
        return
    expected = isinstance(error, TltError)
    rank = int(os.environ.get("RANK", "0"))
    trace = "" if expected else "".join(traceback.format_exception(error))
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    record = WorkerError(rank, message, exit_status, trace, time.time(), isinstance(error, RanksLost))
    with contextlib.suppress(OSError):
        temporary = Path(folder, f".rank{rank}.json.tmp")
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        temporary.rename(Path(folder, f"rank{rank}.json"))


# torchrun looks at its ranks every 0.1 s
_CAUSE_FIRST_S = 3.0


def read_first_error(folder: Path) -> WorkerError | None:
    """The error to show: the first one meant for the user, else the first of all.

    When one rank fails, the collectives of the others break too: their complaints are not the cause.
    """
    errors = []
    for file in folder.glob("rank*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            errors.append(WorkerError(**json.loads(file.read_text(encoding="utf-8"))))
    return min(errors, key=lambda e: (bool(e.traceback), e.time), default=None)


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
    """For the job script: the run was told to stop, and what it did is saved."""
    folder = os.environ.get(LOG_FOLDER)
    if folder and os.environ.get("RANK") == "0":
        with contextlib.suppress(OSError):
            Path(folder, STOPPED).touch()


def run_guarded(main: Callable[[], None]) -> int:
    """Runs one rank's work, leaves its error for the process that launched it, gives back the exit status."""
    # The launcher of this process is torchrun: without it nobody could end the run together.
    die_with_parent(signal.SIGKILL)
    lost_ranks.how_to_end = _end_with
    try:
        _log_to_own_file()
        main()
    except TltError as error:
        _end_if_ranks_are_lost(error)
        write_error(error, error.exit_status)
        if error.exit_status > 128:
            _mark_stopped()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        write_error(TltError(NOTHING_SAVED.format(signal.SIGINT.name)), 128 + signal.SIGINT)
        return 128 + signal.SIGINT
    except Exception as error:
        _end_if_ranks_are_lost(error)
        write_error(error, 1)
        traceback.print_exc()
        return 1
    return 0


def _end_if_ranks_are_lost(error: Exception) -> None:
    """Where the line to other nodes broke: says which ranks are missing, and ends the process.

    Within a node torchrun says who failed first. A rank that is killed closes its connections before its parent can see
    that it ended, so a rank whose connection broke ends later than that.
    """
    if "torch.distributed" not in sys.modules:  # a worker without torch has no such line
        return
    lost = lost_ranks.name_the_lost(error)
    if lost is not None:
        traceback.print_exception(error)
        lost_ranks.end_once(lost, _end_with)
    if lost_ranks.is_broken_line(error):
        time.sleep(_CAUSE_FIRST_S)


def _end_with(error: RanksLost) -> None:
    """At once: threads that still wait for the network would keep the process from ending in the ordinary way."""
    write_error(error, error.exit_status)
    print(f"error: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_status)


def run_worker(main: Callable[[TltConfig], None], argv: Sequence[str] | None = None) -> int:
    """Loads the resolved config named by the one argument, runs ``main``, gives back the exit status.

    A worker module ends with ``sys.exit(run_worker(main))``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def run() -> None:
        if len(arguments) != 1:
            raise ConfigError(f"a worker takes one argument, the resolved config's path; found {arguments!r}")
        main(load_resolved(arguments[0]))

    return run_guarded(run)
