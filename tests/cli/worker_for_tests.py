"""A real worker under torchrun: what it does is said in run.name."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

from megatron_tlt.cli import worker
from megatron_tlt.cli.worker import run_worker
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RanksLost, RunError, TltError


class Stopped(TltError):
    exit_status = 128 + signal.SIGTERM


def die(folder: Path, rank: int, how: str) -> None:
    """Rank 1 does three steps and is killed; started again it does another, is killed once more, or ends well."""
    starts = folder / f"starts{rank}"
    starts.write_text(str(int(starts.read_text()) + 1 if starts.exists() else 1))
    first = starts.read_text() == "1"
    if rank == 1 and (first or how != "dies"):
        while not (other := folder / "starts0").exists() or other.read_text() != starts.read_text():
            time.sleep(0.05)  # or torchrun would end rank 0 before it says that it started
        done = len(list(folder.glob("step*")))
        for step in range(3 if first else how == "dies-further"):
            (folder / f"step{done + step}").touch()
        os.kill(os.getpid(), signal.SIGKILL if first else signal.SIGSEGV)
    if rank == 0 and (first or how != "dies"):
        time.sleep(60)  # ended by torchrun


def die_prepared(folder: Path, rank: int) -> None:
    """At the first start a step is done, and rank 1 is killed once the next start is prepared."""
    start = folder / f"starts{rank}"
    first = not start.exists()
    start.write_text("1" if first else "2")
    (folder / f"parent{rank}").write_text(str(os.getppid()))
    if first:
        (folder / "step0").touch()
        while len(Path(os.environ["TLT_TEST_IMPORTS"]).read_text().split()) < 2 or rank == 0:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def die_late(folder: Path, rank: int) -> None:
    """At the first start rank 0's connection to rank 1 breaks two seconds before rank 1 is seen to be killed."""
    import torch.distributed  # noqa: F401 - as every rank has it that has a connection

    worker._CAUSE_FIRST_S = 4.0  # well above the time in which rank 1 dies, on a loaded machine too
    start = folder / f"starts{rank}"
    first = not start.exists()
    start.write_text("1" if first else "2")
    while not (folder / f"starts{1 - rank}").exists():
        time.sleep(0.05)
    if first and rank == 0:
        raise RuntimeError("gloo: Connection closed by peer")
    if first:
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)


def main(config: TltConfig) -> None:
    rank, folder = os.environ["RANK"], config.run.dir
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if config.run.name == "fine":
        (folder / f"threads{rank}").write_text(os.environ["OMP_NUM_THREADS"])
        (folder / f"name{rank}").write_text(Path("/proc/self/comm").read_text())
        (folder / f"parent{rank}").write_text(str(os.getppid()))
    elif config.run.name == "bad" and rank == "1":
        while not (folder / "ready0").exists():  # or the launcher would end rank 0 before it says who it is
            time.sleep(0.05)
        raise ConfigError("tensor x: found 1; allowed: 2")
    elif config.run.name == "dies-late":
        die_late(folder, int(rank))
    elif config.run.name == "dies-prepared":
        die_prepared(folder, int(rank))
    elif config.run.name.startswith("dies"):
        die(folder, int(rank), config.run.name)
    elif config.run.name == "lost":
        starts = folder / f"starts{rank}"
        starts.write_text("2" if starts.exists() else "1")
        if rank == "0" and starts.read_text() == "1":
            raise RanksLost("rank 0 lost its connection to rank 9")
    elif config.run.name == "aborts":
        starts = folder / f"starts{rank}"
        starts.write_text("2" if starts.exists() else "1")
        if rank == "0":
            atexit.register(os.abort)  # as torch does where the connections of other ranks have gone
        while rank == "1" and not Path(os.environ[worker.ERROR_FOLDER], "rank0.json").exists():
            time.sleep(0.05)  # or torchrun would end rank 0 before it reports its error
        raise RunError("gradient norm nan")
    elif config.run.name == "bug":
        raise ZeroDivisionError("a bug")
    elif config.run.name in ("bad", "wait"):
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, _: stopped.append(signum))
        Path(folder, f"ready{rank}").touch()
        while not stopped:
            time.sleep(0.05)
        Path(folder, f"saved{rank}").touch()
        raise Stopped("stopped by SIGTERM, state saved")


if __name__ == "__main__":
    sys.exit(run_worker(main))
