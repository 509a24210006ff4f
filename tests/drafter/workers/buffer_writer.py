"""Adds entries to a buffer until killed, and prints each key once it is acknowledged."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_tlt.config.drafter import DrafterBufferConfig
from megatron_tlt.drafter.buffer import DataBuffer
from megatron_tlt.drafter.entry import Entry


def numbered(i: int) -> Entry:
    generator = torch.Generator().manual_seed(i)
    length = 20 + i % 50
    tokens = torch.randint(0, 1000, (length,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(length, 2048, generator=generator).bfloat16()
    return Entry(f"0/{i}", 0, tokens, 4, hidden, 0.5)


def main(folder: str) -> None:
    buffer = DataBuffer(Path(folder), DrafterBufferConfig(memory_bytes=1 << 20, disk_bytes=1 << 30), seed=0)
    for i in range(100_000):
        buffer.add(numbered(i))
        if i % 3 == 0:
            keys = buffer.flush()
            print("acknowledged", len(keys), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
