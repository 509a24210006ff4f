"""Registries of algorithms and losses by name; others load by import path. Classes are imported when loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.import_path import check_arguments, is_import_path, load_object, one_line
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tlt.algorithms.algorithm import Algorithm
    from megatron_tlt.algorithms.losses import Loss

ALGORITHMS = {
    "grpo": "megatron_tlt.algorithms.grpo.Grpo",
    "dr_grpo": "megatron_tlt.algorithms.grpo.Grpo",
    "dapo": "megatron_tlt.algorithms.grpo.Grpo",
    "gspo": "megatron_tlt.algorithms.grpo.Grpo",
    "cispo": "megatron_tlt.algorithms.grpo.Grpo",
    "rloo": "megatron_tlt.algorithms.rloo.Rloo",
    "reinforce": "megatron_tlt.algorithms.reinforce.Reinforce",
    "reinforce++": "megatron_tlt.algorithms.reinforce.ReinforcePlusPlus",
    "distillation": "megatron_tlt.algorithms.distillation.Distillation",
    "reinforce++_baseline": "megatron_tlt.algorithms.reinforce.ReinforcePlusPlusBaseline",
}
"""``algorithm.name`` -> import path of the class; ``config.algorithm.RECIPES`` has what else a name sets."""
WHOLE_BATCH = frozenset({"reinforce++", "reinforce++_baseline"})
"""Those of ``ALGORITHMS`` that are not ``per_problem``; known without their libraries."""
LOSSES = {
    "clipped": "megatron_tlt.algorithms.clipped.ClippedPolicyLoss",
    "gspo": "megatron_tlt.algorithms.gspo.GspoLoss",
    "cispo": "megatron_tlt.algorithms.cispo.CispoLoss",
}
"""``algorithm.loss`` -> import path of the class."""
_KEY, _LOSS_KEY = "algorithm.name", "algorithm.loss"


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm of a run.

    Raises:
        ConfigError: unknown name, wrong import path, or arguments that the class does not accept.
    """
    cls = _algorithm_class(config.name)
    check_arguments(cls, config.arguments, 1, "algorithm.arguments", config.name)
    try:
        return cls(config, **config.arguments)
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(
            f"algorithm.arguments: found {config.arguments}; {config.name} refuses them: {one_line(error)}"
        ) from error


def build_loss(config: AlgorithmConfig) -> Loss:
    """The loss ``config.loss``.

    Raises:
        ConfigError: unknown name, wrong import path, or a class that does not take the section.
    """
    _check_known(config.loss, LOSSES, _LOSS_KEY, "mypackage.losses.Mine")
    kind = "a class that takes the algorithm section, with denominator and __call__ (algorithms.losses.Loss)"
    cls: type[Any] = load_object(LOSSES.get(config.loss, config.loss), _LOSS_KEY, _is_loss, "class", kind)
    try:
        loss: Loss = cls(config)
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(f"{_LOSS_KEY}: found {config.loss!r}; it refuses the section: {one_line(error)}") from error
    return loss


def is_per_problem(config: AlgorithmConfig) -> bool | None:
    """Whether advantages depend on a problem's responses alone; None if ``algorithm_problems`` has the class's."""
    if config.name in ALGORITHMS:
        return config.name not in WHOLE_BATCH
    try:
        return _algorithm_class(config.name).per_problem
    except ConfigError:
        return None


def algorithm_problems(config: AlgorithmConfig) -> list[str]:
    """One line per reason why the algorithm or its loss cannot be built; imports torch only for users' classes."""
    found: list[str] = []
    if config.name not in ALGORITHMS or config.arguments:
        found += _problems_of(build_algorithm, config)
    if config.loss not in LOSSES:
        found += _problems_of(build_loss, config)
    return found


def _problems_of(build: Callable[[AlgorithmConfig], object], config: AlgorithmConfig) -> list[str]:
    try:
        build(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _check_known(name: str, registry: Collection[str], key: str, example: str) -> None:
    if name not in registry and not is_import_path(name):
        names = ", ".join(sorted(registry))
        raise ConfigError(f"{key}: found {name!r}; allowed: {names}, or a class's import path such as {example}")


def _is_loss(item: Any) -> bool:
    methods = ("denominator", "__call__")
    return isinstance(item, type) and all(name in dir(item) for name in methods) and not inspect.isabstract(item)


def _algorithm_class(name: str) -> type[Algorithm]:
    _check_known(name, ALGORITHMS, _KEY, "mypackage.algorithms.Mine")
    from megatron_tlt.algorithms.algorithm import Algorithm

    def is_algorithm(item: Any) -> bool:
        return isinstance(item, type) and issubclass(item, Algorithm) and not inspect.isabstract(item)

    kind = "a subclass of megatron_tlt.algorithms.algorithm.Algorithm with advantages"
    cls: type[Algorithm] = load_object(ALGORITHMS.get(name, name), _KEY, is_algorithm, "class", kind)
    return cls
