"""Moves LoRA adapters alone: each engine adds them to its weights itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.models.lora_weights import LORA_A, LORA_B, merged
from megatron_tlt.reshard.interface import HeldWeights, Part, SyncReport, TensorSlice, WeightSync, WeightTarget


class MergingTarget:
    """An engine as the target of adapters (a ``WeightTarget``).

    The engine's weights without adapters are kept on the host, one copy per rank. At the end of each update all of them
    are written anew, with the adapters added in float32 and rounded once: nothing accumulates, and weights that a sleep
    dropped are there again.

    Args:
        engine: this rank's engine.
        shapes: of the adapters' whole tensors; every rank receives them whole, in float32.
        scale: ``alpha / rank``.
    """

    def __init__(self, engine: WeightTarget, shapes: Mapping[str, tuple[int, ...]], scale: float) -> None:
        self._engine, self._shapes, self._scale = engine, shapes, scale
        self._base: list[torch.Tensor] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._held: list[tuple[str, torch.Tensor, TensorSlice | None]] = []

    @property
    def has_base(self) -> bool:
        """Whether :meth:`keep_base` was called."""
        return bool(self._base)

    def keep_base(self) -> None:
        """Copies the engine's weights, which have no adapters now, to the host."""
        weights = self._engine.read_weights()
        self._base = [_on_host(view) for _, view, _ in weights]
        device = weights[0][1].device
        # an engine with expert parallelism lacks the experts of other ranks
        modules = {name.removesuffix(".weight") for name, _, _ in weights}
        for name, shape in self._shapes.items():
            if name.removesuffix(LORA_A).removesuffix(LORA_B) in modules:
                self._buffers[name] = torch.zeros(shape, dtype=torch.float32, device=device)
        self._held = [(name, buffer, None) for name, buffer in self._buffers.items()]

    def begin_update(self, part: Part) -> None:
        """See ``WeightTarget``."""
        self._engine.begin_update(part)

    def finish_update(self, part: Part, version: int) -> None:
        """Writes all weights, then as ``WeightTarget``."""
        self._write()
        self._engine.finish_update(part, version)

    def read_weights(self) -> HeldWeights:
        """The adapters that this rank received."""
        return self._held

    def read_drafter_weights(self) -> HeldWeights:
        """Raises RunError: a drafter has no adapters."""
        raise RunError("adapters belong to the policy; allowed: part policy")

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Raises RunError: adapters are written in place."""
        raise RunError("adapters are written into the buffers of read_weights")

    @torch.no_grad()
    def _write(self) -> None:
        for (name, view, part), base in zip(self._engine.read_weights(), self._base, strict=True):
            module = name.removesuffix(".weight")
            down, up = self._buffers.get(module + LORA_A), self._buffers.get(module + LORA_B)
            if down is None or up is None:
                view.copy_(base)
                continue
            if part is not None and part.dim == 0:
                up = up.narrow(0, part.start, part.length)
            elif part is not None:
                down = down.narrow(1, part.start, part.length)
            view.copy_(merged(base.to(view.device), down, up, self._scale))


class AdapterSync(WeightSync):
    """Moves all weights once, and after that the adapters alone.

    Args:
        base: moves the weights without adapters into the engine.
        adapters: moves the adapters into ``target``.
        target: the engine.
    """

    def __init__(self, base: WeightSync, adapters: WeightSync, target: MergingTarget) -> None:
        self._base, self._adapters, self._target = base, adapters, target

    def sync(self, *, version: int, verify: bool) -> SyncReport:
        """See ``WeightSync.sync``; the report is of the adapters. The first one always verifies the base."""
        if not self._target.has_base:
            self._base.sync(version=version, verify=True)
            self._target.keep_base()
        return self._adapters.sync(version=version, verify=verify)


def _on_host(view: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.is_cuda)
    return copy.copy_(view)
