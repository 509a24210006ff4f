"""Counts what makes the host wait for a GPU in an engine step of ours, on a CPU.

Counted are reads of a tensor, copies to a named device that are not ``non_blocking``, and indices that torch copies
from the host or looks up in a mask. ``Tensor.copy_`` is not: on a CPU all are between host tensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

import megatron_tlt
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.strategy import StepRecord, Strategy

if TYPE_CHECKING:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

ROOT = Path(megatron_tlt.__file__).parents[1]
OURS = tuple(str(ROOT / folder) for folder in ("megatron_tlt", "tests/helpers", "tests/rollout"))
READS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "argwhere"),
    *("__bool__", "__int__", "__index__", "__float__", "__array__"),
}


class HostReads(TorchFunctionMode):
    """Counts by the function of this package that asked for them. To our code a tensor looks as if it was on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        code = sys._getframe(1).f_code
        if code.co_filename.startswith(OURS):
            if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
            if _makes_the_host_wait(getattr(func, "__name__", ""), args, kwargs or {}):
                self.counts[f"{Path(code.co_filename).name}:{code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


def _makes_the_host_wait(name: str, args: Any, options: dict[str, Any]) -> bool:
    if name == "to":
        return not options.get("non_blocking") and any(
            isinstance(each, torch.device | str) for each in (*args[1:], *options.values())
        )
    if name in ("tensor", "as_tensor"):
        return options.get("device") is not None
    if name == "repeat_interleave":
        return "output_size" not in options
    if name in ("__getitem__", "__setitem__"):
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool]
        return any(isinstance(part, list | np.ndarray) for part in parts) or (name == "__getitem__" and bool(masks))
    return name in READS


def reads_of(engine: VllmEngine, strategy: Strategy, requests: int, prompt: tuple[int, ...]) -> Counter[str]:
    """The most reads of a step by function, in a rollout of that many sampled responses."""
    before = engine.strategy
    engine.set_strategy(strategy)
    most: Counter[str] = Counter()
    with HostReads() as reads:

        def on_step(step: StepRecord) -> None:
            for name, count in reads.counts.items():
                most[name] = max(most[name], count)
            reads.counts.clear()

        spec = SamplingSpec(temperature=0.8, max_tokens=8)
        engine.generate([Request(f"r{i}", prompt, spec, seed=i) for i in range(requests)], on_step=on_step)
    engine.set_strategy(before)
    return most
