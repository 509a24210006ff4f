"""One rank of the messages between all pairs of local devices, for ``tlt doctor``.

``pairs.json`` in the folder given has a row per pair: ranks, GB/s, whether the right bytes arrived. ``begun-RANK``
names the pair that a rank is at. ``started`` is there once all ranks have started; from then on the messages have
their limit, after which a rank ends itself.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import current_device, initialize_distributed, leave_distributed, rank, world_size

_START_S = 300
"""Allowed from the first rank's start to the last one's: a cold disk takes minutes to load torch and CUDA."""
_BYTES = 16 << 20
_REPEATS = 4
_POLL_S = 0.01


def _meet() -> None:
    """Waits over the store, not the links, until all ranks have started."""
    store = dist.distributed_c10d._get_default_store()
    store.add("started", 1)
    while store.add("started", 0) < world_size():
        time.sleep(_POLL_S)


def main(folder: str, limit_s: float) -> None:
    initialize_distributed(_START_S)
    device, own = current_device(), rank()
    sent = torch.full((_BYTES,), own, dtype=torch.uint8, device=device.torch_device)
    _meet()
    Path(folder, "started").touch()
    faulthandler.dump_traceback_later(limit_s, exit=True)
    rows: list[tuple[tuple[int, int], float, bool]] = []
    for pair in itertools.combinations(range(world_size()), 2):
        dist.barrier()
        if own not in pair:
            continue
        Path(folder, f"begun-{own}").write_text(f"{pair[0]} and {pair[1]}", encoding="utf-8")
        other = pair[0] + pair[1] - own
        received = torch.empty_like(sent)
        for repeat in range(_REPEATS + 1):
            if repeat == 1:  # the first message connects
                device.synchronize()
                began = time.perf_counter()
            operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        device.synchronize()
        speed = _REPEATS * _BYTES / (time.perf_counter() - began) / 1e9
        if own == pair[0]:
            rows.append((pair, speed, bool((received == other).all())))
    everyone = all_gather_data(rows, list[tuple[tuple[int, int], float, bool]])
    if own == 0:
        found = sorted(row for part in everyone for row in part)
        Path(folder, "pairs.json").write_text(json.dumps(found), encoding="utf-8")
    leave_distributed()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
