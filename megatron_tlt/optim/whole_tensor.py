"""Determines by running it whether an optimizer steps each tensor by itself, and what it needs for that.

A class may run on whole tensors that several ranks own only if stepping two tensors together equals stepping them
apart. A class that couples all tensors (VeLO's network sees features of all of them) runs on one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from megatron_tlt.optim.flat_state import flatten, is_plain

Build = Callable[[list[torch.nn.Parameter]], Optimizer]

_MATRICES = ((96, 90), (64, 96))
_VECTOR = (90,)
_STEPS = 4
OF_MATRICES = _MATRICES[0]
OF_SLICES = (1000,)
"""Shapes for :func:`heeds_group_decay`: of whole matrices, and of flat slices of them."""


class CannotStep(Exception):
    """The optimizer cannot run even on whole tensors, or its state cannot be saved; the message gives the reason."""


@dataclass(frozen=True)
class TensorTraits:
    """What an optimizer of whole tensors needs.

    Attributes:
        coupled: a tensor's step depends on the other tensors, so one rank must own all of them.
        matrices_only: it refuses tensors that are not two-dimensional.
        needs_loss: its step requires the loss of the batch.
        state_bytes: bytes of its state per weight of a matrix, in float32.
    """

    coupled: bool
    matrices_only: bool
    needs_loss: bool
    state_bytes: float


def step_argument(cls: type[Optimizer]) -> Literal["loss", "closure"] | None:
    """What ``step`` requires: the loss of the batch, a closure that recomputes it, or nothing."""
    required = [
        parameter.name
        for parameter in list(inspect.signature(cls.step).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if not required:
        return None
    return "loss" if required == ["loss"] else "closure"


@dataclass(frozen=True)
class _Tensor:
    start: torch.Tensor
    gradients: list[torch.Tensor]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True)
class _Trained:
    parameters: list[torch.Tensor]
    states: list[dict[str, Any]]
    further: dict[str, Any]
    """What the class saves beside the state of parameters: it concerns all of them."""
    moved: str | None
    """An entry of its parameter groups that steps change and that is not plain."""


def further_state(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer saves beside its groups and the state of each parameter."""
    return {name: value for name, value in optimizer.state_dict().items() if name not in ("state", "param_groups")}


def step_with(optimizer: Any, loss: torch.Tensor | None) -> None:
    """A step of a class, with the loss if it takes one, for which torch's own signature has no place."""
    optimizer.step(*([] if loss is None else [loss]))


def _train(build: Build, tensors: Sequence[_Tensor], device: torch.device, with_loss: bool) -> _Trained:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(tensor.start.clone().to(device)) for tensor in tensors]
    optimizer = build(parameters)
    before = _unplain(optimizer)
    for step in range(_STEPS):
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = tensor.gradients[step].clone().to(device)
        step_with(optimizer, torch.tensor(1.0 / (1 + step), device=device) if with_loss else None)
    states = [dict(optimizer.state[parameter]) for parameter in parameters]
    after = _unplain(optimizer)
    moved = next((name for name, value in after.items() if value != before.get(name)), None)
    ends = [parameter.detach().cpu() for parameter in parameters]
    return _Trained(ends, states, further_state(optimizer), moved)


def _unplain(optimizer: Optimizer) -> dict[str, str]:
    """Entries of the first parameter group that are neither parameters nor plain, as texts."""
    group = optimizer.param_groups[0]
    return {name: repr(value) for name, value in group.items() if name != "params" and not is_plain(value)}


def probe_tensors(build: Build, cls: type[Optimizer], device: torch.device | None = None) -> TensorTraits:
    """Steps two matrices and a vector together, and each by itself.

    Args:
        build: creates the optimizer over some parameters, with a learning rate near 0.1 so that its steps are distinct.
        cls: its class.
        device: where it will run.

    Raises:
        CannotStep: with the reason.
    """
    device = device or torch.device("cpu")
    argument = step_argument(cls)
    if argument == "closure":
        raise CannotStep("its step needs a closure that recomputes the loss")
    with_loss = argument == "loss"
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for number, shape in enumerate((*_MATRICES, _VECTOR)):
        gradients = [torch.randn(shape, generator=generator) * 10.0 ** (number - 2) for _ in range(_STEPS)]
        tensors.append(_Tensor(torch.randn(shape, generator=generator), gradients))
    with torch.random.fork_rng():
        matrices_only = False
        try:
            together = _train(build, tensors, device, with_loss)
        except Exception as error:
            try:
                together = _train(build, tensors[:-1], device, with_loss)
            except Exception:
                raise CannotStep(f"its step fails: {_first_line(error)}") from error
            matrices_only = True
            tensors.pop()
        try:
            for state in (*together.states, together.further):
                flatten(state)
        except TypeError as error:
            raise CannotStep(f"it keeps {error}, which no checkpoint can hold") from error
        if together.moved is not None:
            raise CannotStep(f"its steps change {together.moved!r} of its parameter groups, which no checkpoint holds")
        apart = [_train(build, [tensor], device, with_loss).parameters[0] for tensor in tensors]
    coupled = bool(together.further) or not all(
        torch.allclose(one, other, rtol=0.0, atol=1e-3 * float((one - tensor.start).abs().max()) + 1e-6)
        for one, other, tensor in zip(together.parameters, apart, tensors, strict=True)
    )
    size = sum(leaf.nbytes for leaf in flatten(together.states[0]).values() if isinstance(leaf, torch.Tensor))
    return TensorTraits(coupled, matrices_only, with_loss, size / together.parameters[0].numel())


def heeds_group_decay(
    build: Build, cls: type[Optimizer], shape: tuple[int, ...], device: torch.device | None = None
) -> bool:
    """Whether the weight decay that is set in a parameter group, after construction without any, changes a step.

    Args:
        build: as in :func:`probe_tensors`, with a weight decay of 0.
        cls: its class, which can step a tensor of that shape.
        shape: of the tensor that is stepped.
        device: where it will run.
    """

    def decaying(decay: float) -> Build:
        def built(parameters: list[torch.nn.Parameter]) -> Optimizer:
            optimizer = build(parameters)
            for group in optimizer.param_groups:
                group["weight_decay"] = decay
            return optimizer

        return built

    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for _ in range(_STEPS)]
    tensor = _Tensor(torch.randn(shape, generator=generator), gradients)
    with torch.random.fork_rng():
        ends = [
            _train(decaying(decay), [tensor], device or torch.device("cpu"), step_argument(cls) == "loss").parameters[0]
            for decay in (0.0, 0.5)
        ]
    return not torch.equal(*ends)


def step_bytes(build: Build, *, with_loss: bool, size: int = 512) -> float:
    """Bytes per weight that a step holds at most beside weight, gradient and state, measured on a square matrix.

    Args:
        build: as in :func:`probe_tensors`.
        with_loss: whether a step takes the loss.
        size: rows of the matrix.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(size, size))
        optimizer = build([parameter])
        loss = torch.tensor(1.0) if with_loss else None
        parameter.grad = torch.randn(size, size)
        step_with(optimizer, loss)  # makes the state
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
            step_with(optimizer, loss)
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(0, *held, 0) / parameter.numel()
