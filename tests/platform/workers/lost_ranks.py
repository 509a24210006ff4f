"""A rank that meets others again and again: the first would wait for them for seconds, the others for an hour."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tlt.cli.worker import run_guarded
from megatron_tlt.platform import lost_ranks
from megatron_tlt.platform.device import initialize_distributed


def main() -> None:
    waits_in = sys.argv[2]
    if waits_in != "collective":
        lost_ranks._SILENT_S = 2.0
    initialize_distributed(3600)
    patience = timedelta(seconds=3 if dist.get_rank() == 0 else 3600)
    group = dist.new_group(range(dist.get_world_size()), timeout=patience)
    dist.barrier(group)
    Path(sys.argv[1], f"ready{dist.get_rank()}").touch()
    while waits_in != "collective":  # as a kernel of NCCL, which no error ends
        time.sleep(0.01)
    while True:
        dist.all_reduce(torch.zeros(1), group=group)
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
