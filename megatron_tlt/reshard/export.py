"""``reshard.method: export``: whole tensors under Hugging Face names, loaded by every engine rank."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import rank
from megatron_tlt.reshard.checksum import checksum
from megatron_tlt.reshard.interface import SyncReport, TensorSlice, WeightSource, WeightSync, WeightTarget

Checksums = dict[str, tuple[int, int]]


class ExportSync(WeightSync):
    """Streams the source into the target, tensor by tensor, and compares checksums of what each engine rank holds."""

    def __init__(self, source: WeightSource, target: WeightTarget) -> None:
        self._source = source
        self._target = target

    def sync(self, *, verify: bool) -> SyncReport:
        start = time.perf_counter()
        held = {name: (tensor.dtype, part) for name, tensor, part in self._target.read_weights()}
        sent: Checksums = {}
        self._target.load_weights(self._stream(held, sent if verify else None))
        verified = self._compare(held, sent) if verify else 0
        return SyncReport(len(held), verified, time.perf_counter() - start)

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
            if found != sent[name]:
                raise RunError(
                    f"rank {rank()}: {name} in the engine has checksum {found}, the actor sent {sent[name]}: "
                    "the engine holds stale or damaged weights"
                )
        return len(held)


def _slice(tensor: torch.Tensor, part: TensorSlice | None) -> torch.Tensor:
    return tensor if part is None else tensor.narrow(part.dim, part.start, part.length)
