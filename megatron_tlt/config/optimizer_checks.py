"""Rules between the keys of the actor's optimizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from megatron_tlt.config.import_path import is_import_path
from megatron_tlt.config.schema import ActorConfig, TltConfig

_MEGATRON_OPTIMIZERS = ("adam", "sgd")
_OF_WHOLE_TENSORS = {
    "optimizer": ("optimizer", "lr", "weight_decay", "clip_grad", "bf16", "params_dtype"),
    "ddp": (
        "grad_reduce_in_fp32",
        "overlap_grad_reduce",
        "bucket_size",
        "average_in_collective",
        "check_for_nan_in_grad",
        "check_for_large_grads",
        "pad_buckets_for_high_nccl_busbw",
    ),
}
"""Options of Megatron that have their effect where whole tensors are stepped."""
_OF_ONE = ("adam_", "sgd_")
"""A warm-up that inherits the actor's optimizer may have those of another one; :func:`_unused_by` refuses the rest."""
_OF_MEGATRONS_ADAM = ("decoupled_weight_decay", "exp_avg_dtype", "exp_avg_sq_dtype")
_WITHOUT_EFFECT = ("muon_", "log_num_zeros_in_grad")
_LOWEST = {
    "actor.optimizer": "actor.lr_schedule.min_lr_fraction",
    "model.recipe.supervised.optimizer": "model.recipe.supervised.min_lr_fraction",
}


def optimizer_violations(config: TltConfig) -> Iterator[str]:
    """The violated rules, one line each."""
    yield from _optimizer(config)
    yield from _whole_tensors(config)
    yield from _adam_only(config)
    yield from _schedule(config)


def _schedule(config: TltConfig) -> Iterator[str]:
    warm_up, updates = config.actor.lr_warmup_steps, config.trainer.updates
    if config.actor.lr_schedule.kind != "constant" and warm_up >= updates:
        yield (
            f"actor.lr_warmup_steps: found {warm_up}; a {config.actor.lr_schedule.kind} rate falls in the rest of the "
            f"{updates} updates (trainer.steps x trainer.mini_batches); allowed: fewer"
        )


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
    yield from _of_adam(name, actor.optimizer, "actor.optimizer")
    yield from _without_effect(actor.optimizer, "actor.optimizer")
    if config.model.recipe is not None:
        own = config.model.recipe.supervised.optimizer
        path = "model.recipe.supervised.optimizer"
        warm_up = own.get("optimizer", name)
        if "optimizer" in own and warm_up not in _MEGATRON_OPTIMIZERS:
            yield f"{path}.optimizer: found {warm_up!r}; allowed: adam, sgd, or absent for actor.optimizer's"
        elif "optimizer" in own:
            yield from _unused_by(warm_up, own, path)
        yield from _of_adam(warm_up, own, path)
        yield from _without_effect(own, path)


def _import_path(where: str, name: str, allowed: str) -> Iterator[str]:
    package = name.partition(".")[0]
    if not is_import_path(name):
        yield f"{where}: found {name!r}; allowed: {allowed}"
    elif importlib.util.find_spec(package) is None:
        yield (
            f"{where}: found {name!r}; no package {package!r} is installed; allowed: {allowed}, of a package that is"
        )


def refused_with_whole_tensors(actor: ActorConfig) -> Iterator[str]:
    """Keys that have no effect where ``actor.optimizer`` steps whole tensors; a line each."""
    name = actor.optimizer.get("optimizer", "adam")
    for section, known in _OF_WHOLE_TENSORS.items():
        given: dict[str, Any] = getattr(actor, section)
        for key, value in given.items():
            if key in known or key.startswith(_OF_ONE) or key in _OF_MEGATRONS_ADAM:
                continue
            if value not in (None, False):
                yield (
                    f"actor.{section}.{key}: found {value!r}, which has no effect where whole tensors are stepped, as "
                    f"{name} does; allowed: absent"
                )


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
    if config.stream is not None and actor.optimizer_loss == "one_minus_reward":
        yield (
            "actor.optimizer_loss: found one_minus_reward with stream, where an update has the rewards of a part of "
            "the responses; allowed: policy, or no stream section"
        )
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
    if split.matrices == "all" and split.weight_decay:
        yield (
            f"{where}.weight_decay: found {split.weight_decay:g}; matrices: all leaves norms and biases, which are not "
            "decayed; allowed: 0, or matrices: layers"
        )
    for key in ("lr", "weight_decay"):
        if key in split.optimizer_arguments:
            yield f"{where}.optimizer_arguments.{key}: cannot be set here; managed by {where}.{key}"


def _unused_by(name: str, options: dict[str, Any], path: str) -> Iterator[str]:
    """Options of Adam or SGD that have no effect on the chosen optimizer."""
    for key in options:
        owner = "adam" if key.startswith("adam_") else "sgd" if key.startswith("sgd_") else name
        if owner != name:
            yield f"{path}.{key}: has no effect on {name!r}; allowed: with optimizer: {owner}"


def _of_adam(name: Any, options: dict[str, Any], path: str) -> Iterator[str]:
    """Options that Megatron passes to its Adam alone, whose names do not say so."""
    for key in _OF_MEGATRONS_ADAM:
        if name != "adam" and (value := options.get(key)) is not None:
            yield f"{path}.{key}: found {value!r}, which has no effect on {name!r}; allowed: with optimizer: adam"


def _without_effect(options: dict[str, Any], path: str) -> Iterator[str]:
    """Options that no optimizer heeds here."""
    for key, value in options.items():
        if key == "min_lr":
            yield f"{path}.min_lr: cannot be set here; managed by {_LOWEST[path]}"
        elif value and key.startswith(_WITHOUT_EFFECT):
            yield f"{path}.{key}: found {value!r}, which has no effect; allowed: absent"


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
