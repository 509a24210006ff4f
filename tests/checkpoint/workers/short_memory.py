"""Publishes and verifies checkpoints, and saves a drafter's, in a process that has no memory for a further thread."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from megatron_tlt.checkpoint.payload import Payload
from megatron_tlt.checkpoint.publication import Publication, publication_threads
from megatron_tlt.checkpoint.verification import BackgroundVerification
from megatron_tlt.errors import RunError
from megatron_tlt.spot.checkpointer import SelectiveCheckpointer

_ROOM_BYTES = 4 << 20  # the stack of a thread takes more


def limit() -> None:
    room = psutil.Process().memory_info().vms + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 60.0
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def main(out: str, when: str) -> None:
    folder = Path(out)
    if when == "before":
        limit()
    try:
        threads, verification = publication_threads(), BackgroundVerification()
        drafter = SelectiveCheckpointer(folder / "drafter")
    except RunError as error:
        print(f"error: {error}")
        return
    limit()
    for step in (1, 2):
        publication = Publication(folder / f"step_{step}", keep=2)
        for name in ("a", "b", "c"):
            (publication.temporary / name).write_bytes(bytes(1000))
        publication.start(threads)
        until(publication.done)
        verification.start(folder / f"step_{step}")
        until(lambda: verification.poll() == [])
        drafter.save(step, Payload("test", {}, {"a": torch.ones(10)}))
        assert drafter.wait(60.0) and not drafter.counts.failed, drafter.counts.problem
    drafter.close()
    verification.close()
    print("published")


if __name__ == "__main__":
    main(*sys.argv[1:])
