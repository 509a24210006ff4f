"""A device with a memory of its own, on the CPU: what is offloaded really goes, and a sleeping engine holds garbage.

Shows without a GPU what would be out of memory, or would be read after its memory was given up, on one.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import torch

from megatron_tlt.platform.device import Device
from megatron_tlt.rollout.vllm_engine import VllmEngine

BESIDE_ENGINE_BYTES = 320 << 10
"""Allowed in tensors while an engine is built, which takes all the memory that it finds: a host copy of the drafter's
last good weights, buffers, random states. The tests' policy is five times as large."""


def tensor_bytes() -> int:
    """Bytes of all tensors' storages in this process."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.device.type == "cpu" and found.layout == torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _poison(module: torch.nn.Module) -> None:
    for tensor in module.parameters():  # vLLM keeps the buffers
        tensor.data.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(torch.int32).max)


def install() -> None:
    """Makes this process's device such a one."""
    Device.offloads = property(lambda self: True)  # type: ignore[assignment,method-assign]
    build, sleep = VllmEngine.__init__, VllmEngine.sleep

    def build_alone(self: VllmEngine, *args: Any, **options: Any) -> None:
        gc.collect()
        used = tensor_bytes()
        assert used <= BESIDE_ENGINE_BYTES, f"out of memory: {used} bytes are in use where an engine is built"
        build(self, *args, **options)

    def sleep_and_forget(self: VllmEngine, level: int = 1) -> None:
        sleep(self, level)
        if level > 1:
            _poison(self._runner.get_model())
            if getattr(self._runner, "drafter", None) is not None and hasattr(self._runner.drafter, "model"):
                _poison(self._runner.drafter.model)
            self._versions.drop()

    VllmEngine.__init__ = build_alone  # type: ignore[assignment,method-assign]
    VllmEngine.sleep = sleep_and_forget  # type: ignore[assignment,method-assign]
