"""Calls launch() as a command does: argv is the resolved config and the log."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_tlt.cli.launch import launch
from megatron_tlt.config.loader import load_resolved

config = load_resolved(sys.argv[1])


def progress() -> tuple[int, int]:
    done = len(list(config.run.dir.glob("step*")))
    return done, max(0, done - 1)


log = Path(sys.argv[2])
sys.exit(launch("tests.cli.worker_for_tests", [sys.argv[1]], config.launcher, log=log, progress=progress))
