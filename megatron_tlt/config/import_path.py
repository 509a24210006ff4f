"""Loads users' code by an import path ``package.module.Name`` in a config."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron_tlt.config.violations import closest
from megatron_tlt.errors import ConfigError


def is_import_path(name: str) -> bool:
    """Whether ``name`` has the form ``package.module.Name``; nothing is imported."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def one_line(error: BaseException) -> str:
    """Formats an exception of users' code for a message: its type and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def load_object(path: str, key: str, is_kind: Callable[[Any], bool], noun: str, kind: str) -> Any:
    """Loads the object at ``package.module.Name``. Its package must be installed or on PYTHONPATH.

    Args:
        path: the import path.
        key: the config key that names it, for errors.
        is_kind: whether an object is valid for ``key``.
        noun: one word for a valid object, such as class or function.
        kind: description of a valid object.

    Raises:
        ConfigError: the module cannot be imported, has no such name, or the object is not valid.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{key}: found {path!r}; {module_name!r} cannot be imported: {one_line(error)}; "
            f"allowed: {kind} of a package that is installed or on PYTHONPATH"
        ) from error
    found = getattr(module, name, None)
    if found is None or not is_kind(found):
        what = f"no {noun} {name!r} in {module_name}" if found is None else f"not {kind}"
        near = closest(name, (other for other, item in vars(module).items() if other[0] != "_" and is_kind(item)))
        raise ConfigError(f"{key}: found {path!r}; {what}; {near}")
    return found


def check_arguments(cls: Callable[..., Any], arguments: Mapping[str, Any], given: int, key: str, name: str) -> None:
    """Checks that a constructor takes ``arguments`` after its first ``given`` parameters, which the config cannot set.

    Args:
        cls: the class, or another callable.
        arguments: from the config, by name.
        given: number of positional arguments in addition to them.
        key: the config key of the arguments, for errors.
        name: the class's name in the config.

    Raises:
        ConfigError: one line per argument that it does not take, otherwise the first missing argument.
    """
    signature = inspect.signature(cls)
    taken = signature.parameters.values()
    positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = [*positional[given:], *(p for p in taken if p.kind is p.KEYWORD_ONLY)]
    names = {p.name for p in others if p.kind is not p.POSITIONAL_ONLY}
    if not any(p.kind is p.VAR_KEYWORD for p in taken) and (unknown := arguments.keys() - names):
        lines = [
            f"{key}.{argument}: {name} does not take it; "
            + (closest(argument, names) if names else "allowed: no arguments")
            for argument in sorted(unknown)
        ]
        raise ConfigError("\n".join(lines))
    try:
        signature.bind(*[None] * given, **arguments)
    except TypeError as error:
        raise ConfigError(f"{key}: found {dict(arguments)}; {name}{signature} refuses them: {error}") from error
