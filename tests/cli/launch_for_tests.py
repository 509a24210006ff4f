"""Calls launch() as a command does: argv is the resolved config and the log, and, if given, what is preloaded."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_tlt.cli.launch import launch
from megatron_tlt.config.loader import load_resolved

config = load_resolved(sys.argv[1])


def progress() -> tuple[int, int]:
    done = len(list(config.run.dir.glob("step*")))
    return done, max(0, done - 1)


log, preload = Path(sys.argv[2]), sys.argv[3:]
worker, given = "tests.cli.worker_for_tests", [sys.argv[1]]
sys.exit(launch(worker, given, config.launcher, log=log, progress=progress, preload=preload))
