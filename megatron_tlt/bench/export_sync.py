"""What direct transfers are held against: whole tensors under Hugging Face names, loaded by every engine rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import failing_together
from megatron_tlt.platform.device import rank
from megatron_tlt.reshard.checksum import checksum
from megatron_tlt.reshard.interface import SyncReport, TensorSlice, WeightSync, WeightTarget

Checksums = dict[str, torch.Tensor]
WeightSource = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Yields every weight under its Hugging Face name; a collective that every rank exhausts."""


class ExportSync(WeightSync):
    """Streams the source into the target, tensor by tensor, and compares checksums with those in each engine rank."""

    def __init__(self, source: WeightSource, target: WeightTarget) -> None:
        self._source = source
        self._target = target

    def sync(self, *, version: int, verify: bool) -> SyncReport:
        start = time.perf_counter()
        held = {name: (tensor.dtype, part) for name, tensor, part in self._target.read_weights()}
        sent: Checksums = {}
        self._target.begin_update("policy")
        self._target.load_weights(self._stream(held, sent if verify else None))
        with failing_together():
            verified = self._compare(held, sent) if verify else 0
        self._target.finish_update("policy", version)
        return SyncReport(len(held), verified, time.perf_counter() - start, version)

    def _stream(
        self, held: dict[str, tuple[torch.dtype, TensorSlice | None]], sent: Checksums | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source():
            if sent is not None and name in held:
                dtype, part = held[name]
                sent[name] = checksum(_slice(tensor, part).to(dtype))
            yield name, tensor

    def _compare(self, held: dict[str, tuple[torch.dtype, TensorSlice | None]], sent: Checksums) -> int:
        missing = sorted(set(held) - set(sent))
        if missing:
            raise RunError(f"rank {rank()}: {missing[0]} is in the engine, but the actor did not send it")
        for name, tensor, _ in self._target.read_weights():
            found = checksum(tensor)
            if not torch.equal(found, sent[name]):
                raise RunError(
                    f"rank {rank()}: {name} in the engine has checksum {tuple(found.tolist())}, the actor sent "
                    f"{tuple(sent[name].tolist())}: the engine holds stale or damaged weights"
                )
        return len(held)


def _slice(tensor: torch.Tensor, part: TensorSlice | None) -> torch.Tensor:
    return tensor if part is None else tensor.narrow(part.dim, part.start, part.length)
