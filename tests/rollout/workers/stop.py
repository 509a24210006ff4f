"""One of two ranks in lockstep, of which rank 1 gets a SIGTERM; writes at which step, and how soon, each one stops."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tlt.rollout.stop import StopAgreement

SIGNAL_AT_S, LIMIT_S = 1.5, 30.0


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, asked = dist.get_rank(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    stop = StopAgreement(asked.is_set, dist.new_group([0, 1]))
    if rank == 1:
        threading.Timer(SIGNAL_AT_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began, step, stopped = time.monotonic(), 0, False
    while not stopped and time.monotonic() - began < LIMIT_S:
        time.sleep(0.02 if rank else 0.002)  # each rank measures other times between the steps
        dist.all_reduce(torch.ones(1))  # an engine step's collective: nobody may leave the other one here
        step += 1
        stopped = stop()
    seconds = time.monotonic() - began - SIGNAL_AT_S
    (Path(out) / f"rank{rank}.json").write_text(json.dumps({"step": step, "stopped": stopped, "seconds": seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
