"""One rank of a synchronization between plain tensors: the mechanism on real gloo, with a fault if one is named.

Ranks hold halves of each tensor (a "stage" of two ranks each owns half of the tensors) and need quarters, wholes or
halves of them, in another dtype if asked for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import Device, barrier, initialize_distributed, rank, world_size
from megatron_tlt.reshard.direct import DirectSync, WholeTensors
from megatron_tlt.reshard.exchange import BucketExchange
from megatron_tlt.reshard.interface import HeldWeights, Part
from megatron_tlt.reshard.spans import Span
from megatron_tlt.rollout.types import ShardSlice

TENSORS, ROWS, COLUMNS = 6, 64, 6400


class Memory:
    """An engine's part in plain memory."""

    def __init__(self, whole: WholeTensors, engine_tp: int, dtype: torch.dtype) -> None:
        self.slices: dict[str, tuple[torch.Tensor, ShardSlice | None]] = {}
        for name, shape in whole.shapes.items():
            dim = whole.cut_dims[name]
            share = shape[dim] // engine_tp
            part = ShardSlice(dim, rank() % engine_tp * share, share) if engine_tp > 1 else None
            local = list(shape)
            local[dim] = share
            self.slices[name] = torch.full(local, float("nan"), dtype=dtype), part
        self.versions: dict[str, int | None] = {"policy": None, "drafter": None}
        self.device_waited = False

    def synchronize(self, device: Device) -> None:
        self.device_waited = True

    def begin_update(self, part: Part) -> None:
        self.versions[part], self.device_waited = None, False

    def finish_update(self, part: Part, version: int) -> None:
        assert self.device_waited, "on a GPU the copies would only have been launched"
        self.versions[part] = version

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        raise AssertionError("whole tensors are not loaded here")

    def read_weights(self) -> HeldWeights:
        return [(name, tensor, part) for name, (tensor, part) in self.slices.items()]

    read_drafter_weights = read_weights


class DyingExchange(BucketExchange):
    """The last rank is killed with its first round under way."""

    def post(self, outgoing, incoming):  # type: ignore[no-untyped-def]
        posted = super().post(outgoing, incoming)
        if rank() == world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return posted


class FlippingExchange(BucketExchange):
    """One bit of what the last rank sends is another on the wire."""

    def post(self, outgoing, incoming):  # type: ignore[no-untyped-def]
        if rank() == world_size() - 1:
            message = outgoing[0]
            bits = message.staged if message.bucket.packed else message.in_place[0].view(torch.uint8).view(-1)
            bits[bits.numel() // 3] ^= 1
        return super().post(outgoing, incoming)


def values(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """What a whole tensor holds at a version."""
    generator = torch.Generator().manual_seed(1000 * version + int(name.removeprefix("tensor")))
    return torch.randn(shape, generator=generator)


def whole_tensors() -> WholeTensors:
    names = [f"tensor{i}" for i in range(TENSORS)]
    return WholeTensors(dict.fromkeys(names, (ROWS, COLUMNS)), {name: i % 2 for i, name in enumerate(names)})


def held(whole: WholeTensors, version: int, dtype: torch.dtype, missing: str) -> list[tuple[Span, torch.Tensor]]:
    """This rank's halves of its stage's tensors."""
    stage, half = divmod(rank(), 2)
    views = []
    for index, (name, shape) in enumerate(whole.shapes.items()):
        if index * 2 // TENSORS == stage and name != missing:
            dim = whole.cut_dims[name]
            share = shape[dim] // 2
            view = values(name, shape, version).narrow(dim, half * share, share)
            views.append((Span(name, half * share, share), view.to(dtype)))
    return views


def main(engine_tp: int, actor_dtype: str, engine_dtype: str, staging_kb: int, fault: str, out: str) -> None:
    initialize_distributed(30)
    whole = whole_tensors()
    actor, engine = getattr(torch, actor_dtype), getattr(torch, engine_dtype)
    memory = Memory(whole, engine_tp, engine)
    Device.synchronize = lambda self: memory.synchronize(self)  # type: ignore[method-assign]
    exchange = {"kill": DyingExchange, "flip": FlippingExchange}.get(fault, BucketExchange)
    if fault == "kill":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others: they speak first
    version = 0
    sync = DirectSync(
        lambda: held(whole, version, actor, "tensor3" if fault == "missing" else ""),
        memory,
        whole,
        source_layout="actor TP2 PP2",
        engine_layout=f"TP{engine_tp} x {world_size() // engine_tp}",
        staging_bytes=staging_kb * 1024,
        exchange=exchange,
    )
    reports = []
    try:
        for version in (1, 2, 3):
            reports.append(sync.sync(version=version, verify=version != 2))
            for name, (tensor, part) in memory.slices.items():
                expected = values(name, whole.shapes[name], version).to(actor).to(engine)
                if part is not None:
                    expected = expected.narrow(part.dim, part.start, part.length)
                assert torch.equal(tensor, expected), f"{name} on rank {rank()}"
    except RunError as error:
        line = f"ENDED rank {rank()} versions {memory.versions['policy']}: {error}\n"
        os.write(1, line.encode())  # in one piece
        if fault != "kill":
            barrier()  # so that the launcher does not end the others before they say so
        sys.exit(3)
    assert memory.versions["policy"] == 3
    barrier()  # nobody leaves while another still talks to it
    row = [[r.sent_bytes, r.received_bytes, r.copied_bytes, r.lower_bound_bytes, r.staging_bytes] for r in reports]
    Path(out, f"rank{rank()}.json").write_text(
        json.dumps({"bytes": row, "verified": [r.verified_tensors for r in reports]}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6])
