"""An optimizer class by import path, with its arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from megatron_tlt.config.import_path import load_object
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.config.violations import closest
from megatron_tlt.errors import ConfigError
from megatron_tlt.optim.element_wise import NotElementWise, StateLayout, probe
from megatron_tlt.optim.whole_tensor import (
    OF_MATRICES,
    OF_SLICES,
    CannotStep,
    TensorTraits,
    heeds_group_decay,
    probe_tensors,
    step_argument,
    step_bytes,
)


@dataclass(frozen=True)
class OptimizerKeys:
    """Config keys of an optimizer, its arguments and its weight decay, for error messages."""

    name: str
    arguments: str
    weight_decay: str
    sharding: str | None = None
    """None: it has no choice."""


SHARDING_KEY = "actor.optimizer_sharding"
ACTOR_KEYS = OptimizerKeys(
    "actor.optimizer.optimizer", "actor.optimizer_arguments", "actor.optimizer.weight_decay", SHARDING_KEY
)
SPLIT_KEYS = OptimizerKeys(
    "actor.optimizer_split.optimizer", "actor.optimizer_split.optimizer_arguments", "actor.optimizer_split.weight_decay"
)
_SGD_MOMENTUM = 0.9  # Megatron's default
_SCHEDULED = ("lr", "weight_decay")
_REQUIRED = {"closure": "a closure that recomputes the loss", "loss": "the loss of the batch"}

Sharding = Literal["element", "tensor", "coupled"]
"""What an optimizer's ranks own: slices of flattened parameters, whole tensors, or one of them all tensors."""


def load_class(path: str, keys: OptimizerKeys = ACTOR_KEYS) -> type[Optimizer]:
    """The optimizer class at ``package.module.Class``.

    Raises:
        ConfigError: the module or class does not exist, or is not a ``torch.optim.Optimizer``.
    """

    def is_optimizer(item: Any) -> bool:
        return isinstance(item, type) and issubclass(item, Optimizer) and item is not Optimizer

    found: type[Optimizer] = load_object(path, keys.name, is_optimizer, "class", "a torch.optim.Optimizer class")
    return found


def _constructor(cls: type[Optimizer]) -> tuple[set[str], bool]:
    """The constructor's argument names after the parameters, and whether it accepts any other name."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}, anything


@dataclass(frozen=True)
class OptimizerChoice:
    """An element-wise optimizer class, its arguments, and the layout of its state."""

    cls: type[Optimizer]
    arguments: dict[str, Any]
    layout: StateLayout

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """The optimizer over parameter groups, without weight decay, as :meth:`TensorOptimizerChoice.build` does."""
        return _build(self.cls, self.arguments, groups, lr, 0.0)


@dataclass(frozen=True)
class TensorOptimizerChoice:
    """A class that steps whole tensors, its arguments, and what it needs; ``coupled``: one rank owns all tensors."""

    path: str
    cls: type[Optimizer]
    arguments: dict[str, Any]
    traits: TensorTraits
    coupled: bool

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """The optimizer over parameter groups, without weight decay, which the schedule sets in each group.

        A class may derive more from the constructor's decay, such as that of vectors (PyLO's ``adam_weight_decay``),
        which are not to decay. A class that draws its own initial values draws the same every time.
        """
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return _build(self.cls, self.arguments, groups, lr, 0.0)

    def step_bytes(self) -> float:
        """Bytes per weight of a tensor that a step holds beside weights, gradients and state; measured."""
        return step_bytes(lambda tensors: self.build([{"params": tensors}], 1e-3), with_loss=self.traits.needs_loss)


def _build(cls: type[Optimizer], arguments: dict[str, Any], parameters: Any, lr: float, decay: float) -> Optimizer:
    known, anything = _constructor(cls)
    scheduled: dict[str, Any] = {"lr": lr, "weight_decay": decay}
    return cls(parameters, **{k: v for k, v in scheduled.items() if anything or k in known}, **arguments)


def _check_arguments(
    path: str, cls: type[Optimizer], arguments: dict[str, Any], weight_decay: float, keys: OptimizerKeys
) -> None:
    known, anything = _constructor(cls)
    if not anything:
        allowed = known.difference(_SCHEDULED)
        for key in arguments:
            if key not in allowed:
                raise ConfigError(f"{keys.arguments}.{key}: {path} does not take it; {closest(key, allowed)}")
        if "lr" not in known:
            raise ConfigError(f"{keys.name}: {path} takes no lr; allowed: a class whose rate a schedule can set")
        if weight_decay and "weight_decay" not in known:
            raise ConfigError(f"{keys.weight_decay}: found {weight_decay}; {path} takes none; allowed: 0")
    try:
        # Some classes refuse a vector, none a matrix.
        _build(cls, arguments, [torch.nn.Parameter(torch.zeros(2, 2))], 0.1, 0.0)
    except Exception as error:  # a learned optimizer reads its weights, from a folder or a hub
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{keys.arguments}: {path} refuses {arguments}: {said}") from error


def plain_optimizer(
    path: str,
    arguments: dict[str, Any],
    parameters: list[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    keys: OptimizerKeys,
) -> Optimizer:
    """The optimizer at ``path`` over full parameters; it need not be element-wise.

    Raises:
        ConfigError: the class does not exist, does not accept an argument or its value, takes no learning rate, takes
            no weight decay although ``weight_decay`` is not 0, or its step requires an argument.
    """
    cls = load_class(path, keys)
    _check_arguments(path, cls, arguments, weight_decay, keys)
    if required := step_argument(cls):
        raise ConfigError(f"{keys.name}: {path} needs {_REQUIRED[required]}; allowed: an optimizer that does not")
    return _build(cls, arguments, parameters, lr, weight_decay)


def choose_optimizer(
    path: str,
    arguments: dict[str, Any],
    weight_decay: float = 0.0,
    device: torch.device | None = None,
    sharding: Sharding | Literal["auto", "whole"] = "auto",
    keys: OptimizerKeys = ACTOR_KEYS,
) -> OptimizerChoice | TensorOptimizerChoice:
    """The class at ``path`` with ``arguments`` for its constructor; the schedule owns its rate and weight decay.

    Args:
        path: ``package.module.Class``.
        arguments: for the constructor, without parameters, rate and weight decay.
        weight_decay: the value that the schedule will set.
        device: where it will run.
        sharding: what ranks own; ``auto`` is the smallest part on which the class steps as on all tensors together,
            ``whole`` the smallest but slices.
        keys: of the launch config, for errors.

    Raises:
        ConfigError: the class does not exist, does not accept an argument or its value, takes no learning rate, takes
            no weight decay although ``weight_decay`` is not 0, does not heed that of a parameter group, or cannot step
            what ranks own (with the reason).
    """
    cls = load_class(path, keys)
    _check_arguments(path, cls, arguments, weight_decay, keys)

    def build(tensors: list[Any]) -> Optimizer:
        return _build(cls, arguments, tensors, 0.1, 0.01)

    def heeds(shape: tuple[int, ...]) -> bool:
        return heeds_group_decay(lambda tensors: _build(cls, arguments, tensors, 0.1, 0.0), cls, shape, device)

    ignored = (
        f"{keys.weight_decay}: found {weight_decay:g}; {path} does not heed the weight_decay of a parameter group, so "
        "matrices could not decay without norms and biases; allowed: 0"
    )
    if sharding in ("auto", "element"):
        try:
            if required := step_argument(cls):
                raise NotElementWise(f"its step needs {_REQUIRED[required]}")
            choice = OptimizerChoice(cls, dict(arguments), probe(build, device))
            if not weight_decay or heeds(OF_SLICES):
                return choice
            if sharding == "element":
                raise ConfigError(ignored)
            # It may heed the decay of whole tensors, of which it knows which are matrices.
        except NotElementWise as reason:
            if sharding == "element":
                raise ConfigError(
                    f"{keys.name}: {path} cannot run under the distributed optimizer: {reason}; allowed with "
                    f"{SHARDING_KEY}: element: adam, sgd, or an element-wise class such as torch.optim.RAdam"
                ) from reason
    try:
        traits = probe_tensors(build, cls, device)
    except CannotStep as reason:
        said = f"{path} cannot step whole tensors: {reason}"
        raise ConfigError(f"{keys.name}: {said}; allowed: another class") from reason
    if weight_decay and not heeds(OF_MATRICES):
        raise ConfigError(ignored)
    if traits.coupled and sharding == "tensor":
        depends = f"but a step of {path} on one tensor depends on the others"
        if keys.sharding is None:
            raise ConfigError(f"{keys.name}: found {path}, {depends}; allowed: a class that steps each by itself")
        raise ConfigError(f"{keys.sharding}: found tensor, {depends}; allowed: auto, or coupled")
    return TensorOptimizerChoice(path, cls, dict(arguments), traits, traits.coupled or sharding == "coupled")


def choose_actor_optimizers(
    actor: ActorConfig, device: torch.device | None
) -> tuple[OptimizerChoice | TensorOptimizerChoice | None, TensorOptimizerChoice | None]:
    """The class of ``actor.optimizer`` (None: Megatron's Adam) and that of ``actor.optimizer_split``, if there is one.

    Raises:
        ConfigError: as :func:`choose_optimizer` does.
    """
    path, arguments = actor.optimizer.get("optimizer", "adam"), actor.optimizer_arguments
    split, sharding = actor.optimizer_split, actor.optimizer_sharding
    if path == "adam":
        return None, None
    if path == "sgd":
        path, arguments = "torch.optim.SGD", {"momentum": actor.optimizer.get("sgd_momentum", _SGD_MOMENTUM)}
    decay = float(actor.optimizer.get("weight_decay", 0.0))
    if split is None:
        return choose_optimizer(path, arguments, decay, device, sharding), None
    # a split is one of whole tensors
    main = choose_optimizer(path, arguments, decay, device, "whole" if sharding == "auto" else sharding)
    others = choose_optimizer(
        split.optimizer, split.optimizer_arguments, split.weight_decay, device, "tensor", SPLIT_KEYS
    )
    assert isinstance(others, TensorOptimizerChoice)
    return main, others
