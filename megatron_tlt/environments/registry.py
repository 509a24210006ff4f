"""Environments by name or import path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from megatron_tlt.config.import_path import is_import_path, load_object, one_line
from megatron_tlt.config.task import EnvironmentConfig, TaskConfig
from megatron_tlt.environments.calculator import Calculator
from megatron_tlt.environments.http import HttpEnvironment
from megatron_tlt.environments.search import Search
from megatron_tlt.environments.tools import ToolEnvironment, tools_of
from megatron_tlt.environments.verifiers_library import VerifiersEnvironment
from megatron_tlt.errors import ConfigError

ENVIRONMENTS: dict[str, type] = {
    "calculator": Calculator,
    "search": Search,
    "http": HttpEnvironment,
    "verifiers": VerifiersEnvironment,
}
"""By name in ``tasks[].environment.name``."""


def load_environment(name: str, params: Mapping[str, Any], key: str) -> Callable[[], Any]:
    """Makes an environment for an episode.

    A class with ``step`` is an environment; one with ``reset`` and other public methods is a set of tools
    (:class:`~megatron_tlt.environments.tools.ToolEnvironment`).

    Args:
        name: of ``ENVIRONMENTS``, or the import path of a class.
        params: its arguments.
        key: the key in the config, for errors.

    Raises:
        ConfigError: there is no such class, it has neither form, or it refuses ``params``.
    """
    found = _class_of(name, f"{key}.name")
    try:
        tried = found(**params)
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(f"{key}.params: found {dict(params)}; {name} refuses them: {one_line(error)}") from error
    if not callable(getattr(tried, "reset", None)):
        raise ConfigError(f"{key}.name: {name} has no method reset; allowed: reset and step, or reset and tools")
    if callable(getattr(tried, "step", None)):
        return lambda: found(**params)
    if not tools_of(tried):
        raise ConfigError(f"{key}.name: {name} has neither a method step nor any tool; allowed: one of the two")
    return lambda: ToolEnvironment(found(**params))


def tool_schemas(environment: EnvironmentConfig, key: str) -> list[dict[str, Any]] | None:
    """What a chat template shows of an environment's tools; None without tools or with ``tools_in_prompt: false``.

    Raises:
        ConfigError: as :func:`load_environment`; or a tool cannot be described.
    """
    made = load_environment(environment.name, environment.params, key)()
    if not environment.tools_in_prompt or not hasattr(made, "tool_schemas"):
        return None
    try:
        return made.tool_schemas() or None
    except ConfigError as error:
        raise ConfigError(f"{key}.name: {environment.name}: {error}") from error


def environment_problems(tasks: Iterable[TaskConfig]) -> list[str]:
    """One line per task whose environment cannot be made or described."""
    lines = []
    for position, task in enumerate(tasks):
        key = f"tasks[{position}].environment"
        if task.environment is None:
            continue
        try:
            tool_schemas(task.environment, key)
        except ConfigError as error:
            lines.append(str(error))
    return lines


@lru_cache(maxsize=64)
def _class_of(name: str, key: str) -> Any:
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if not is_import_path(name):
        names = ", ".join(sorted(ENVIRONMENTS))
        raise ConfigError(f"{key}: unknown environment {name!r}; allowed: {names}, or the import path of a class")
    return load_object(name, key, lambda item: isinstance(item, type), "class", "a class")
