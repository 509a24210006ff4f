"""Rank 0 makes groups with one other at a time, which comes, goes, hangs or dies; rank<r>.json says what it saw."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.errors import TltError
from megatron_tlt.platform.rank_group import broadcast_plain
from megatron_tlt.platform.subset_group import SubsetGroup

LIMIT_S = 60.0
CPU = torch.device("cpu")


def never() -> bool:
    return False


def raised(act: Callable[[], object]) -> str:
    try:
        act()
    except TltError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def main(out: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once the first has died
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    store = dist.distributed_c10d._get_default_store()
    rank, found = dist.get_rank(), dict[str, Any]()
    if rank == 1:  # takes no part in anything of the first two groups
        group = SubsetGroup.form("death", (0, 1), never, never, LIMIT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    group = SubsetGroup.form("pair", (2, 0), never, never, LIMIT_S)
    tensors = [torch.tensor(1.0), torch.tensor(2.0)]
    group.all_reduce(tensors)
    plain = broadcast_plain(group, {"from": rank}, dict[str, int], 2, CPU)
    found["pair"] = {"sum": [float(x) for x in tensors], "plain": plain}

    again = SubsetGroup.form("pair again", (2, 0), never, never, LIMIT_S)
    again.all_reduce(tensors)
    found["again"] = {"same": again.group is group.group, "sum": [float(x) for x in tensors]}

    def gone(stop: Callable[[], bool]) -> str:
        return raised(lambda: SubsetGroup.form("gone", (0, 2), stop, never, LIMIT_S))

    if rank == 0:
        found["gone"] = gone(lambda: True)
        store.set("rank 0 has gone", b"1")
        found["alone"] = raised(lambda: SubsetGroup.form("alone", (0, 2), never, never, 0.3))
    else:
        store.wait(["rank 0 has gone"], timedelta(seconds=LIMIT_S))
        found["gone"] = gone(never)

    if rank == 0:  # the other has come, and hangs before it connects
        store.set("late/members", b"1")
        found["late"] = raised(lambda: SubsetGroup.form("late", (0, 2), never, after(0.3), LIMIT_S))

    ends: list[Callable[[], bool]] = []
    group = SubsetGroup.form("hang", (0, 2), never, lambda: any(end() for end in ends), LIMIT_S)
    if rank == 0:
        ends.append(after(0.3))
        began = time.monotonic()
        found["hang"] = raised(lambda: group.all_reduce([torch.ones(1000)]))
        found["waited_s"] = time.monotonic() - began
    # only one of both has abandoned the connection: both make another
    mended = SubsetGroup.form("mended", (0, 2), never, never, LIMIT_S)
    ones = [torch.ones(3)]
    mended.all_reduce(ones)
    found["mended"] = {"same": mended.group is group.group, "sum": ones[0].tolist()}
    if rank == 0:
        with_the_dying = SubsetGroup.form("death", (0, 1), never, never, LIMIT_S)
        found["death"] = raised(lambda: with_the_dying.all_reduce([torch.ones(1000)]))
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(found))
    store.set(f"{rank} is through", b"1")
    store.wait(["0 is through", "2 is through"], timedelta(seconds=LIMIT_S))
    os._exit(0)  # nobody waits for the dead one


if __name__ == "__main__":
    main(sys.argv[1])
