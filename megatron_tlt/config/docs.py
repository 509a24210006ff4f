"""What each key of a launch config means, with type, default and bounds from the schema."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_tlt.config.libraries import library_fields
from megatron_tlt.config.passthrough import TARGETS
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.violations import closest
from megatron_tlt.errors import ConfigError

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "null"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@dataclass(frozen=True)
class KeyDocs:
    """One key: ``kind`` and ``default`` in words, with the bounds."""

    key: str
    kind: str
    default: str
    meaning: str


@cache
def meanings() -> dict[str, str]:
    """The text of each key of the schema."""
    return dict(yaml.safe_load(resources.files(__package__).joinpath("keys.yaml").read_text(encoding="utf-8")))


def keys(section: type[BaseModel] = TltConfig, prefix: str = "") -> Iterator[KeyDocs]:
    """All keys of a section, in the schema's order; a list's rows without an index.

    A list inside a section, whose rows have keys that are explained elsewhere, is one key.
    """
    for name, field in section.model_fields.items():
        nested = bool(prefix) and typing.get_origin(field.annotation) is list
        if not nested and (inner := _sections(field.annotation)):
            yield from keys(inner[0], f"{prefix}{name}.")
        else:
            key = f"{prefix}{name}"
            yield KeyDocs(key, _kind(field), _default(field), meanings().get(key, ""))


def lookup(key: str) -> list[KeyDocs]:
    """A key, or all keys of a section; also a field of a library that a key passes through.

    Raises:
        ConfigError: there is no such key; names similar ones.
    """
    wanted = ".".join(part for part in key.split(".") if not part.isdecimal())
    known = list(keys())
    if found := [one for one in known if one.key == wanted or one.key.startswith(f"{wanted}.")]:
        return found
    names = {one.key for one in known} | {one.key.rpartition(".")[0] for one in known}
    for target in TARGETS:
        if wanted.startswith(f"{target.path}."):
            name, fields = wanted.removeprefix(f"{target.path}."), library_fields(target.module, target.class_name)
            meaning = f"passed through to {target.class_name} of {target.module}; see there"
            if name in target.owned:
                return [KeyDocs(wanted, "cannot be set", "-", f"managed by {target.owned[name]}")]
            if name in fields:
                return [KeyDocs(wanted, str(fields[name]) or "any value", "the library's", meaning)]
            if not fields:
                return [KeyDocs(wanted, "unknown, the library is not installed", "the library's", meaning)]
            names = {f"{target.path}.{field}" for field in fields}
    raise ConfigError(f"--docs: no key {key!r}; {closest(wanted, names - {''})}")


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections(part)]


def _kind(field: FieldInfo) -> str:
    words = " or ".join(_words(field.annotation))
    bounds = [*_bounds(field.metadata)]
    for part in typing.get_args(field.annotation):
        bounds += _bounds(getattr(part, "__metadata__", ()))
    return ", ".join([words, *bounds])


def _words(annotation: Any) -> list[str]:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(parts[0])
    if origin is typing.Literal:
        return [" or ".join(map(str, parts))]
    if origin in (typing.Union, UnionType):
        return [word for part in parts for word in _words(part)]
    if origin in (list, tuple):
        return ["list of " + ("sections" if _sections(parts[0]) else " or ".join(_words(parts[0])))]
    return ["mapping" if origin is dict else _WORDS.get(annotation, str(annotation))]


def _bounds(metadata: Any) -> Iterator[str]:
    for item in metadata:
        inside = item.metadata if isinstance(item, FieldInfo) else [item]
        for bound in inside:
            yield from (f"{word} {getattr(bound, name)}" for name, word in _BOUNDS.items() if hasattr(bound, name))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none, it must be given"
    if field.default_factory is not None:
        return {dict: "{}", list: "[]"}.get(field.default_factory, "depends on other keys")  # type: ignore[call-overload]
    value = field.default
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
