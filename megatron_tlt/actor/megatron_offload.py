"""Offloads the actor's tensors while engines decode, and reloads them for the actor's phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_tlt.actor.megatron_model import MegatronModel
from megatron_tlt.actor.whole_tensors import WholeTensorOptimizer
from megatron_tlt.platform.device import current_device
from megatron_tlt.platform.offload import StorageOffload


def gradient_buffers(ddp_chunks: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The flat tensors in which Megatron accumulates gradients; none for a frozen model."""
    for chunk in ddp_chunks:
        if isinstance(chunk, DistributedDataParallel):
            yield from (buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)


class PhaseOffload:
    """Offloads parameters, gradients and optimizer state of one policy.

    On a device without separate memory every call does nothing, unless ``enabled`` is True.
    """

    def __init__(self, model: MegatronModel, optimizer: Any, *, enabled: bool | None = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._enabled = current_device().offloads if enabled is None else enabled
        self._storages = StorageOffload()

    def offload(self) -> int:
        """Frees the policy's device memory; returns the bytes freed. Call :meth:`reload` before using the policy."""
        if not self._enabled:
            return 0
        # Gradients are zeroed before the next accumulation, so their values need not be kept.
        freed = self._storages.offload(self._gradients(), keep=False)
        freed += self._storages.offload(self._kept())
        current_device().empty_cache()
        return freed

    def reload(self) -> None:
        """Restores all tensors; does nothing if they are not offloaded."""
        self._storages.reload()

    def _gradients(self) -> Iterator[torch.Tensor]:
        yield from gradient_buffers(self._model.ddp_chunks)
        if isinstance(self._optimizer, WholeTensorOptimizer):
            yield from self._optimizer.gradients.values()

    def _kept(self) -> Iterator[torch.Tensor]:
        for chunk in self._model.chunks:
            yield from (parameter.data for parameter in chunk.parameters())
        if isinstance(self._optimizer, WholeTensorOptimizer):
            yield from self._optimizer.tensors()
            return
        wrappers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for wrapper in (w for w in wrappers if getattr(w, "optimizer", None) is not None):
            for group in wrapper.optimizer.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for state in wrapper.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
