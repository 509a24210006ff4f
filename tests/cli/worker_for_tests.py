"""A real worker under torchrun: what it does is said in run.name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_tlt.cli.worker import run_worker
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, TltError


class Stopped(TltError):
    exit_status = 128 + signal.SIGTERM


def main(config: TltConfig) -> None:
    rank, folder = os.environ["RANK"], config.run.dir
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if config.run.name == "fine":
        (folder / f"threads{rank}").write_text(os.environ["OMP_NUM_THREADS"])
    elif config.run.name == "bad" and rank == "1":
        while not (folder / "ready0").exists():  # or the launcher would end rank 0 before it says who it is
            time.sleep(0.05)
        raise ConfigError("tensor x: found 1; allowed: 2")
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
