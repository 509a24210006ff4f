"""Determines by running it whether an optimizer is element-wise.

The distributed optimizer gives each rank flat slices of parameters, cut at arbitrary positions. A class may run on
them only if its steps on the slices equal its step on the full parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

Build = Callable[[list[torch.Tensor]], Optimizer]
Number = int | float | bool

SHAPE = (96, 90)  # above the size from which quantizing optimizers quantize
_STEPS = 4
_CUTS = (1, 3000, 3007)
# Checkpoints store state in float32, which represents these types exactly.
_EXACT = (torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.int8, torch.uint8, torch.bool)


class NotElementWise(Exception):
    """The optimizer cannot run on slices of parameters, or its state cannot be saved; the message gives the reason."""


@dataclass(frozen=True)
class StateLayout:
    """The state that an element-wise optimizer keeps for a parameter.

    Attributes:
        tensors: entries of the parameter's shape, with their types.
        numbers: entries that are the same for all parameters (a step count), with an example: a number or 0-d tensor.
    """

    tensors: dict[str, torch.dtype]
    numbers: dict[str, torch.Tensor | Number]

    def number(self, name: str, value: Number) -> torch.Tensor | Number:
        """``value`` in the type that the optimizer uses."""
        example = self.numbers[name]
        return torch.full_like(example, value) if isinstance(example, torch.Tensor) else type(example)(value)


def plain_number(value: torch.Tensor | Number) -> Number:
    """A numeric state entry as a Python number."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True)
class _Trained:
    """A parameter after all steps, its state, and the names of the state entries after the first step."""

    parameter: torch.Tensor
    state: dict[str, Any]
    early_names: set[str]


def _train(
    build: Build, start: torch.Tensor, gradients: Sequence[torch.Tensor], device: torch.device, seed: int
) -> _Trained:
    torch.manual_seed(seed)
    parameter = torch.nn.Parameter(start.clone().to(device))
    optimizer = build([parameter])
    early: set[str] = set()
    for i, gradient in enumerate(gradients):
        parameter.grad = gradient.clone().to(device)
        optimizer.step()
        if i == 0:
            early = set(optimizer.state[parameter])
    return _Trained(parameter.detach().cpu(), dict(optimizer.state[parameter]), early)


def _layout(state: dict[str, Any], shape: torch.Size) -> StateLayout:
    tensors: dict[str, torch.dtype] = {}
    numbers: dict[str, torch.Tensor | Number] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == shape:
            if value.dtype not in _EXACT:
                raise NotElementWise(f"it keeps {name!r} as {value.dtype}, which a checkpoint's float32 cannot hold")
            tensors[name] = value.dtype
        elif isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.dim() == 0):
            numbers[name] = value
        else:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise NotElementWise(
                f"it keeps {name!r} ({what}), which is neither of the parameter's shape nor one number: "
                "a checkpoint could not be loaded under another layout"
            )
    return StateLayout(tensors, numbers)


def _check_slice(found: _Trained, expected: _Trained, layout: StateLayout, moved: float) -> None:
    names = {*layout.tensors, *layout.numbers}
    odd = names ^ found.early_names | names ^ set(found.state)
    if odd:
        raise NotElementWise(f"it keeps {', '.join(sorted(odd))} at some steps or for some parameters only")
    if not torch.allclose(found.parameter, expected.parameter, rtol=0.0, atol=1e-3 * moved + 1e-6):
        raise NotElementWise("its step on a slice of a parameter differs from its step on the full parameter")
    for name in layout.tensors:
        if getattr(found.state[name], "shape", None) != found.parameter.shape:
            raise NotElementWise(f"it keeps {name!r}, whose shape does not follow the slice's")
    for name in layout.numbers:
        if plain_number(found.state[name]) != plain_number(expected.state[name]):
            raise NotElementWise(f"it keeps {name!r}, one number that differs between slices of a parameter")


def probe(build: Build, device: torch.device | None = None, cuts: Sequence[int] = _CUTS) -> StateLayout:
    """Steps an optimizer on a full matrix and on its flat slices, with one optimizer per slice as on ranks.

    Args:
        build: creates the optimizer over some tensors, with a learning rate near 0.1 so that its steps are distinct.
        device: where it will run.
        cuts: positions at which the flattened matrix of ``SHAPE`` is cut, ascending.

    Raises:
        NotElementWise: with the reason.
    """
    device = device or torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=generator)
    # Slices of very different norms reveal any norm over more than one element.
    scale = torch.logspace(-3, 1, start.numel()).view(SHAPE)
    gradients = [torch.randn(SHAPE, generator=generator) * scale for _ in range(_STEPS)]
    with torch.random.fork_rng():
        try:
            whole = _train(build, start, gradients, device, seed=0)
        except Exception as error:
            raise NotElementWise(f"its step fails: {_first_line(error)}") from error
        layout = _layout(whole.state, whole.parameter.shape)
        rows = [torch.tensor_split(x.flatten(), list(cuts)) for x in (start, whole.parameter, *gradients)]
        for piece, end, *slopes in zip(*rows, strict=True):
            if not piece.numel():
                continue
            try:
                # A different seed reveals an optimizer that draws random numbers.
                found = _train(build, piece, slopes, device, seed=1)
            except Exception as error:
                raise NotElementWise(f"it does not accept a flat slice of a parameter: {_first_line(error)}") from error
            _check_slice(found, replace(whole, parameter=end), layout, float((end - piece).abs().max()))
    return layout
