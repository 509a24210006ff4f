"""An optimizer of whole tensors: each rank owns some Hugging Face tensors, and steps them as plain torch would.

Gradients and weights travel by the plans of the reshard, so a step does not depend on the actor's layout: q, k and v,
gate and up, and experts are tensors of their own wherever Megatron keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from megatron_tlt.actor.megatron_model import MegatronModel
from megatron_tlt.actor.megatron_weights import ADAPTERS, shards
from megatron_tlt.config.lora import LoraConfig
from megatron_tlt.errors import RunError
from megatron_tlt.models.lora_weights import adapter_cut_dims, adapter_shapes
from megatron_tlt.optim.choice import TensorOptimizerChoice
from megatron_tlt.optim.flat_state import Leaf, flatten
from megatron_tlt.optim.owners import assign_owners
from megatron_tlt.optim.whole_tensor import step_with
from megatron_tlt.platform.device import current_device, rank, world_size
from megatron_tlt.reshard.direct import DirectSync, WholeTensors
from megatron_tlt.reshard.interface import HeldWeights, Part, SpanViews, TensorSlice
from megatron_tlt.reshard.spans import Span

STAGING_BYTES = 256 << 20
"""Limit of a rank's buffers while gradients or weights travel."""
_NORM_NUMEL = 1 << 22


class _Slice(NamedTuple):
    dim: int
    start: int
    length: int


class _Held(NamedTuple):
    """A part of a tensor that this rank's model holds: where it is, and views of its values and of its gradient."""

    name: str
    part: _Slice
    values: torch.Tensor
    gradient: torch.Tensor

    @property
    def span(self) -> Span:
        return Span(self.name, self.part.start, self.part.length)


class _Memory:
    """Views of this rank's memory as the target of a transfer (a ``WeightTarget``)."""

    def __init__(self, views: Iterable[tuple[str, torch.Tensor, TensorSlice | None]]) -> None:
        self._views = list(views)

    def begin_update(self, part: Part) -> None: ...

    def finish_update(self, part: Part, version: int) -> None: ...

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        raise NotImplementedError("these are written in place")

    def read_weights(self) -> HeldWeights:
        return self._views

    def read_drafter_weights(self) -> HeldWeights:
        return []


def trained_tensors(model: MegatronModel, lora: LoraConfig | None) -> WholeTensors:
    """The tensors that the update trains: the model's or, with ``lora``, the adapters'."""
    weights = model.weights
    if lora is None:
        return WholeTensors(weights.shapes, weights.cut_dims)
    shapes = adapter_shapes(weights.shapes, lora.targets, lora.rank)
    return WholeTensors(shapes, adapter_cut_dims(weights.cut_dims, shapes))


def gradient_of(parameter: Any) -> torch.Tensor:
    """Where Megatron's DDP accumulates a parameter's gradient, in its shape."""
    found: torch.Tensor = parameter.main_grad
    return found


def sum_of_squares(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's squares, a float64 number that depends on its values and shape alone."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for piece in gradient.flatten().split(_NORM_NUMEL):  # float64 copies, one at a time
        total += piece.double().square().sum()
    return total


def _held(model: MegatronModel, lora: LoraConfig | None) -> Iterator[_Held]:
    if lora is not None:
        for factor in (factor for chunk in model.chunks if hasattr(chunk, ADAPTERS) for factor in chunk.lora.factors):
            part = _Slice(factor.dim, factor.start, factor.parameter.shape[factor.dim])
            yield _Held(factor.tensor, part, factor.parameter.detach(), gradient_of(factor.parameter))
        return
    for shard in shards(model.weights, model.chunks):
        for piece in shard.pieces:
            views = (
                tensor.narrow(piece.dim, piece.offset, piece.length)
                for tensor in (shard.parameter.detach(), gradient_of(shard.parameter))
            )
            yield _Held(piece.name, _Slice(piece.dim, piece.start, piece.length), *views)


class TensorPart:
    """The tensors that one class steps.

    Args:
        choice: the class.
        shapes: of all its tensors.
        lr: the highest learning rate.
        min_lr: the last one.
        weight_decay: of tensors with more than one dimension.
    """

    def __init__(
        self,
        choice: TensorOptimizerChoice,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        lr: float,
        min_lr: float,
        weight_decay: float,
    ) -> None:
        self.choice = choice
        self.shapes = shapes
        rates = {"lr": lr, "max_lr": lr, "min_lr": min_lr}
        self.groups: list[dict[str, Any]] = [
            {**rates, "weight_decay": decay, "start_wd": decay, "end_wd": decay} for decay in (weight_decay, 0.0)
        ]
        """What the schedule sets, the same on every rank: of tensors with several dimensions, and of vectors."""
        self.masters: dict[str, torch.nn.Parameter] = {}
        self.optimizer: Optimizer | None = None

    def own(self, masters: dict[str, torch.nn.Parameter]) -> None:
        """Begins with these tensors, float32, and without state."""
        self.masters = masters
        several = [[m for m in masters.values() if m.dim() > 1], [m for m in masters.values() if m.dim() <= 1]]
        self.owned_groups = [number for number, tensors in enumerate(several) if tensors]
        """Which of ``groups`` have tensors here, in the order of the class's own groups."""
        if not masters:
            return
        groups = [{"params": tensors} for tensors in several if tensors]
        self.optimizer = self.choice.build(groups, self.groups[0]["lr"])

    def step(self, loss: torch.Tensor | None) -> None:
        """Steps the owned tensors, whose gradients are set."""
        if self.optimizer is None:
            return
        for group, number in zip(self.optimizer.param_groups, self.owned_groups, strict=True):
            scheduled = self.groups[number]
            group["lr"], group["weight_decay"] = scheduled["lr"], scheduled["weight_decay"]
        memory = {name: master.data for name, master in self.masters.items()}
        step_with(self.optimizer, loss if self.choice.traits.needs_loss else None)
        for name, master in self.masters.items():
            if master.data_ptr() != memory[name].data_ptr():  # the class replaced it, and transfers read the old one
                master.data = memory[name].copy_(master.data)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that it keeps of the owned tensors."""
        for name, master in self.masters.items():
            yield master.data
            yield from (leaf for leaf in self.leaves_of(name).values() if isinstance(leaf, torch.Tensor))

    def leaves_of(self, name: str) -> dict[str, Leaf]:
        """The leaves of an owned tensor's state; none before the first step.

        Raises:
            RunError: the class has begun to keep what no checkpoint can hold.
        """
        state = {} if self.optimizer is None else dict(self.optimizer.state.get(self.masters[name], {}))
        try:
            return flatten(state)
        except TypeError as error:
            raise RunError(
                f"{self.choice.path}: for {name} it keeps {error}; allowed: tensors, numbers, texts and None, in "
                "lists, tuples and dictionaries"
            ) from error


class WholeTensorOptimizer:
    """Steps every trained tensor on the rank that owns it; all methods are collectives over the world.

    It stands where Megatron's optimizer would, for the policy and for Megatron's schedule.

    Args:
        model: with gradient buffers that are reduced on every rank (no distributed optimizer).
        lora: of the model.
        parts: each tensor belongs to one of them.
        clip_grad: highest norm of the gradient of all tensors; 0 for no limit.
        layout: of the actor, for errors.
    """

    def __init__(
        self,
        model: MegatronModel,
        lora: LoraConfig | None,
        parts: Sequence[TensorPart],
        clip_grad: float,
        layout: str,
    ) -> None:
        self.parts = parts
        self._clip_grad = clip_grad
        whole = trained_tensors(model, lora)
        self.shapes = whole.shapes
        coupled = [name for part in parts if part.choice.coupled for name in part.shapes]
        self.owners = assign_owners(whole.shapes, world_size(), coupled)
        device = current_device().torch_device
        own = [name for name, owner in self.owners.items() if owner == rank()]
        values = {name: torch.zeros(whole.shapes[name], dtype=torch.float32, device=device) for name in own}
        self.gradients = {name: torch.zeros_like(value) for name, value in values.items()}
        held = list(_held(model, lora))

        def moving(source: SpanViews, target: _Memory, to: tuple[str, str]) -> DirectSync:
            return DirectSync(
                lambda: source, target, whole, source_layout=to[0], engine_layout=to[1], staging_bytes=STAGING_BYTES
            )

        in_model = f"actor {layout}", "owners of tensors"
        self._gather_gradients = moving(
            [(one.span, one.gradient) for one in held],
            _Memory((n, g, None) for n, g in self.gradients.items()),
            in_model,
        )
        gather_weights = moving(
            [(one.span, one.values) for one in held], _Memory((n, v, None) for n, v in values.items()), in_model
        )
        self._scatter_weights = moving(
            [(Span(n, 0, whole.shapes[n][whole.cut_dims[n]]), v) for n, v in values.items()],
            _Memory((one.name, one.values, one.part) for one in held),
            in_model[::-1],
        )
        gather_weights.sync(version=0, verify=True)
        for part in parts:
            part.own({name: torch.nn.Parameter(values[name]) for name in part.shapes if name in values})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """What Megatron's schedule sets."""
        return [group for part in self.parts for group in part.groups]

    @property
    def needs_loss(self) -> bool:
        """Whether a step takes the loss of the batch."""
        return any(part.choice.traits.needs_loss for part in self.parts)

    def zero_grad(self) -> None:
        """Nothing: each step overwrites the owners' gradients."""

    @torch.no_grad()
    def prepare_gradients(self) -> float:
        """Gathers the gradients and returns their norm; weights and state stay as they are."""
        self._gather_gradients.sync(version=0, verify=False)
        return self._norm()

    @torch.no_grad()
    def step_with_gradients(self, norm: float, loss: torch.Tensor | None = None) -> None:
        """Clips the gathered gradients of this norm, steps, and returns the weights to the model."""
        factor = self._clip_grad / (norm + 1e-6) if self._clip_grad > 0 else 1.0
        for part in self.parts:
            for name, master in part.masters.items():
                master.grad = self.gradients[name].mul_(factor) if factor < 1.0 else self.gradients[name]
            part.step(loss)
            for master in part.masters.values():
                master.grad = None
        self.write_back()

    def _norm(self) -> float:
        """The norm of all gradients; the sum is in the order of the tensors, whoever owns them."""
        squares = torch.zeros(len(self.shapes), dtype=torch.float64, device=current_device().torch_device)
        for at, name in enumerate(self.shapes):
            if name in self.gradients:
                squares[at] += sum_of_squares(self.gradients[name])
        dist.all_reduce(squares)
        return math.sqrt(math.fsum(squares.tolist()))

    @torch.no_grad()
    def write_back(self) -> None:
        """Writes the owners' weights into the model on every rank."""
        self._scatter_weights.sync(version=0, verify=False)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Weights and state of the owned tensors, for an offload."""
        for part in self.parts:
            yield from part.tensors()
