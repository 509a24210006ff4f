"""Writers that are killed at random moments; prints, after each, what a reader finds as a line of JSON.

Each writer is forked, saves versions whose tensors are filled with the version, and reports durable versions in a
pipe.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from megatron_tlt.checkpoint.payload import Payload
from megatron_tlt.spot.checkpointer import SelectiveCheckpointer, newest

KIND = "test.v1"
SHAPES = {"a": (300, 500), "b": (7,), "c": ()}


def payload_at(version: int) -> Payload:
    tensors = {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}
    return Payload(KIND, {"version": version}, tensors)


def version_of(payload: Payload) -> int:
    """The version in the header and in all tensors.

    Raises:
        AssertionError: they differ.
    """
    version = int(payload.header["version"])
    assert {name: tuple(tensor.shape) for name, tensor in payload.tensors.items()} == SHAPES
    assert all((tensor == version).all() for tensor in payload.tensors.values()), f"torn: {version}"
    return version


def write_until_killed(folder: Path, first: int, told: int) -> None:
    checkpointer = SelectiveCheckpointer(folder, keep=2)
    for version in range(first, first + 10_000):
        checkpointer.save(version, payload_at(version))
        if version % 3:  # after every third, the next save comes while it waits or is written
            assert checkpointer.wait(60.0)
            assert checkpointer.counts.durable_version == version and not checkpointer.counts.failed
            os.write(told, version.to_bytes(8, "little"))


def main(folder: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    root, first, before = Path(folder), 1, 0
    with SelectiveCheckpointer(root) as checkpointer:
        checkpointer.save(0, payload_at(0))
    write_s = checkpointer.counts.write_s
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            write_until_killed(root, first, writing)
            os._exit(1)
        os.close(writing)
        # after some versions, however slow the machine is, and then in the middle of something
        told, wanted = b"", 8 * rng.randrange(4)
        while len(told) < wanted:
            told += (more := os.read(reading, wanted - len(told)))
            assert more, "the writer has ended"
        time.sleep(rng.uniform(0.0, 2 * write_s))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with open(reading, "rb") as pipe:
            told += pipe.read()
        durable = max([before, *(int.from_bytes(told[i : i + 8], "little") for i in range(0, len(told), 8))])
        found = newest(root, KIND)
        version = -1 if found is None else version_of(found.payload)
        hidden = sum(entry.name.startswith(".") for entry in root.iterdir())
        print(json.dumps({"durable": durable, "found": version, "half_written": hidden}), flush=True)
        before, first = version, max(version, first) + 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
