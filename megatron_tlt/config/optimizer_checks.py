"""Rules between the keys of the actor's optimizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from megatron_tlt.config.import_path import is_import_path
from megatron_tlt.config.schema import ActorConfig, TltConfig

_MEGATRON_OPTIMIZERS = ("adam", "sgd")


def optimizer_violations(config: TltConfig) -> Iterator[str]:
    """The violated rules, one line each."""
    yield from _optimizer(config)
    yield from _whole_tensors(config)
    yield from _adam_only(config)


def _optimizer(config: TltConfig) -> Iterator[str]:
    actor = config.actor
    name = actor.optimizer.get("optimizer", "adam")
    if not isinstance(name, str):
        return  # reported by the pass-through check
    where = "actor.optimizer.optimizer"
    if name not in _MEGATRON_OPTIMIZERS:
        yield from _import_path(where, name, "adam, sgd, or a class's import path such as torch.optim.RAdam")
    for key in actor.optimizer_arguments:
        if name in _MEGATRON_OPTIMIZERS:
            yield (
                f"actor.optimizer_arguments.{key}: {where} is {name!r}, which takes its arguments from "
                "actor.optimizer; allowed: none, or an optimizer class by import path"
            )
        elif key in ("lr", "weight_decay"):
            yield f"actor.optimizer_arguments.{key}: cannot be set here; managed by actor.optimizer.{key}"
    yield from _unused_by(name, actor.optimizer, "actor.optimizer")
    if config.model.recipe is not None:
        own = config.model.recipe.supervised.optimizer
        path = "model.recipe.supervised.optimizer"
        warm_up = own.get("optimizer", name)
        if "optimizer" in own and warm_up not in _MEGATRON_OPTIMIZERS:
            yield f"{path}.optimizer: found {warm_up!r}; allowed: adam, sgd, or absent for actor.optimizer's"
        elif "optimizer" in own:
            yield from _unused_by(warm_up, own, path)


def _import_path(where: str, name: str, allowed: str) -> Iterator[str]:
    package = name.partition(".")[0]
    if not is_import_path(name):
        yield f"{where}: found {name!r}; allowed: {allowed}"
    elif importlib.util.find_spec(package) is None:
        yield f"{where}: found {name!r}; no package {package!r} is installed"


def refused_with_whole_tensors(actor: ActorConfig) -> Iterator[str]:
    """Keys that belong to the distributed optimizer, where ``actor.optimizer`` steps whole tensors; a line each."""
    name = actor.optimizer.get("optimizer", "adam")
    for key in ("overlap_param_gather", "use_megatron_fsdp"):
        if actor.ddp.get(key):
            yield f"actor.ddp.{key}: found true; {name} steps whole tensors; allowed: false"


def _whole_tensors(config: TltConfig) -> Iterator[str]:
    """What concerns optimizers of whole tensors, or of all of them."""
    actor = config.actor
    name, split, sharding = actor.optimizer.get("optimizer", "adam"), actor.optimizer_split, actor.optimizer_sharding
    if name == "adam" and sharding in ("tensor", "coupled"):
        yield (
            f"actor.optimizer_sharding: found {sharding}; adam is Megatron's, under the distributed optimizer; "
            "allowed: auto, element, or actor.optimizer.optimizer=torch.optim.AdamW"
        )
    if name in _MEGATRON_OPTIMIZERS and actor.optimizer_loss != "policy":
        yield f"actor.optimizer_loss: found {actor.optimizer_loss}; {name} takes no loss; allowed: policy"
    if sharding in ("tensor", "coupled") or split is not None:  # otherwise running the class decides it
        yield from refused_with_whole_tensors(actor)
    if split is None:
        return
    where = "actor.optimizer_split"
    if name in _MEGATRON_OPTIMIZERS or sharding == "element":
        found = f"actor.optimizer.optimizer {name}" if sharding != "element" else "actor.optimizer_sharding element"
        yield (
            f"{where}: found {found}, which owns slices of all parameters; allowed: with the import path of a class, "
            "and optimizer_sharding auto, tensor or coupled"
        )
    yield from _import_path(f"{where}.optimizer", split.optimizer, "a class's import path such as torch.optim.AdamW")
    for key in ("lr", "weight_decay"):
        if key in split.optimizer_arguments:
            yield f"{where}.optimizer_arguments.{key}: cannot be set here; managed by {where}.{key}"


def _unused_by(name: str, options: dict[str, Any], path: str) -> Iterator[str]:
    """Options of Adam or SGD that have no effect on the chosen optimizer."""
    for key in options:
        owner = "adam" if key.startswith("adam_") else "sgd" if key.startswith("sgd_") else name
        if owner != name:
            yield f"{path}.{key}: has no effect on {name!r}; allowed: with optimizer: {owner}"


def _adam_only(config: TltConfig) -> Iterator[str]:
    """Megatron options that support only Adam's state; its non-distributed optimizer is refused, as it is not saved."""
    if config.actor.ddp.get("use_distributed_optimizer", True) is False:
        yield "actor.ddp.use_distributed_optimizer: found false; checkpoints hold its shards; allowed: true"
    recipe = config.model.recipe
    both = [config.actor.optimizer, *([{**config.actor.optimizer, **recipe.supervised.optimizer}] if recipe else [])]
    others = [options for options in both if options.get("optimizer", "adam") != "adam"]
    if not others:
        return
    name = others[0]["optimizer"]
    for key in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if any(options.get(key) for options in others):
            yield f"actor.optimizer.{key}: found true; optimizer {name!r} does not support it; allowed: false"
    if config.actor.ddp.get("use_megatron_fsdp"):
        yield f"actor.ddp.use_megatron_fsdp: found true; optimizer {name!r} does not support it; allowed: false"
