"""Registry of algorithms by name; others load by import path. Classes are imported when loaded."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.import_path import check_arguments, is_import_path, load_object, one_line
from megatron_tlt.config.schema import AlgorithmConfig
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tlt.algorithms.algorithm import Algorithm

#: ``algorithm.name`` -> import path of the class.
ALGORITHMS = {
    "grpo": "megatron_tlt.algorithms.grpo.Grpo",
    "dr_grpo": "megatron_tlt.algorithms.dr_grpo.DrGrpo",
}
_KEY = "algorithm.name"


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


def algorithm_problems(config: AlgorithmConfig) -> list[str]:
    """One line per reason why ``build_algorithm`` would fail; imports torch only for users' classes."""
    if config.name in ALGORITHMS and not config.arguments:
        return []
    try:
        build_algorithm(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _algorithm_class(name: str) -> type[Algorithm]:
    if name not in ALGORITHMS and not is_import_path(name):
        names = ", ".join(sorted(ALGORITHMS))
        raise ConfigError(
            f"{_KEY}: found {name!r}; allowed: {names}, or a class's import path such as mypackage.algorithms.Mine"
        )
    from megatron_tlt.algorithms.algorithm import Algorithm

    def is_algorithm(item: Any) -> bool:
        return isinstance(item, type) and issubclass(item, Algorithm) and not inspect.isabstract(item)

    kind = "a subclass of megatron_tlt.algorithms.algorithm.Algorithm with advantages and loss"
    cls: type[Algorithm] = load_object(ALGORITHMS.get(name, name), _KEY, is_algorithm, "class", kind)
    return cls
