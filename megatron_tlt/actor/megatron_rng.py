"""The states of all random generators that training uses, as a part of a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker

from megatron_tlt.platform.device import current_device, rank, warn

_FILE = "state.json"


def _text(state: Any) -> str:
    """A generator's state (a tensor of bytes, or a generator under CUDA graphs) in hexadecimal digits."""
    return convert_cuda_rng_state(state).numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


class RngState:
    """The generators of Python, NumPy, torch and the device, and Megatron's per parallel group.

    Dropout differs between ranks depending on the layout, so the states are restored only under the same layout.
    """

    name = "rng"

    def __init__(self, layout: dict[str, int]) -> None:
        self._layout = layout

    def save(self, folder: Path) -> None:
        name, key, *rest = np.random.get_state()
        state = {
            "layout": self._layout,
            "python": random.getstate(),
            "numpy": [name, np.asarray(key).tolist(), *rest],
            "torch": _text(torch.get_rng_state()),
            "device": _text(torch.cuda.get_rng_state()) if current_device().is_cuda else None,
            "megatron": {key: _text(value) for key, value in get_cuda_rng_tracker().get_states().items()},
        }
        (folder / _FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folders: Sequence[Path]) -> None:
        states = json.loads((folders[min(rank(), len(folders) - 1)] / _FILE).read_text(encoding="utf-8"))
        if states["layout"] != self._layout:
            warn(
                f"{folders[0].parent}: random states of layout {states['layout']}, but this run has "
                f"{self._layout}: they are initialized anew, so dropout differs from that of an uninterrupted run"
            )
            return
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(_tensor(states["torch"]))
        if states["device"] is not None and current_device().is_cuda:
            torch.cuda.set_rng_state(_tensor(states["device"]))
        tracker = get_cuda_rng_tracker()
        graphable = {key: isinstance(value, torch.Generator) for key, value in tracker.get_states().items()}
        tracker.set_states(
            {
                key: convert_cuda_rng_state(_tensor(text), to_graphable=graphable.get(key, False))
                for key, text in states["megatron"].items()
            }
        )
