"""Rank 0 waits in a collective that rank 1 does not come to; the error that ends it goes to error.txt."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tlt.errors import RanksLost
from megatron_tlt.platform import phase_watch
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.platform.phase_watch import PhaseWatch

LIMITS_S = {0: 2.0, 1: 600.0}


def main(folder: Path) -> None:
    phase_watch._EVERY_S = 0.1

    def end(error: RanksLost) -> None:
        (folder / "error.txt").write_text(str(error))
        os._exit(0)

    initialize_distributed(60)
    group = dist.new_group([0, 1], group_desc="PAIR")
    dist.all_reduce(torch.ones(3), group=group)
    barrier()
    store = dist.distributed_c10d._get_default_store()
    PhaseWatch({"update": LIMITS_S[rank()]}, store, rank(), 2, folder, end).begin("update")
    if rank() == 0:
        dist.all_reduce(torch.ones(3), group=group)
    while not (folder / "error.txt").exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
