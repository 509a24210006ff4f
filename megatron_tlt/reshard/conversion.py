"""From the actor's dtype to the engine's; where quantized forms plug in."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_tlt.errors import RunError

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Quantization(Protocol):
    """How tensors reach an engine that keeps them in a narrower form, such as fp8 with scales of its own."""

    def encode(self, tensor: str, source: torch.Tensor, out: torch.Tensor) -> None:
        """Writes a slice of Hugging Face tensor ``tensor`` into ``out``, of its shape and the engine's dtype."""
        ...


QUANTIZATIONS: dict[torch.dtype, Quantization] = {}
"""By the engine's dtype: register one here before the first synchronization. None is built in."""


def wire_dtype(tensor: str, actor: torch.dtype, engine: torch.dtype) -> torch.dtype:
    """What a tensor travels as: the narrower of the two, so that it is rounded (once) where it comes from.

    Raises:
        RunError: the engine keeps it in a form that nobody registered a quantization for.
    """
    if engine == actor:
        return engine
    if engine not in _PLAIN and engine not in QUANTIZATIONS:
        raise RunError(
            f"{tensor}: the engine keeps it as {engine}, the actor as {actor}; allowed: "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _PLAIN)}, or a dtype registered in "
            "reshard.conversion.QUANTIZATIONS"
        )
    return engine if engine.itemsize <= actor.itemsize else actor


def convert(tensor: str, source: torch.Tensor, out: torch.Tensor) -> None:
    """Writes ``source`` into ``out``, rounding to nearest even where that is narrower."""
    if out.dtype == source.dtype or out.dtype in _PLAIN:
        out.copy_(source)
    else:
        QUANTIZATIONS[out.dtype].encode(tensor, source, out)


def converted(tensor: str, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``source`` as ``dtype``: itself where it is that already."""
    if source.dtype == dtype:
        return source
    out = torch.empty(source.shape, dtype=dtype, device=source.device)
    convert(tensor, source, out)
    return out
