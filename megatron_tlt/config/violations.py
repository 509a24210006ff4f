"""Formats Pydantic's errors for the user: path, found value, allowed values."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_tlt.config.migrations import RENAMED

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "path": "a path"}


def closest(key: str, known: Iterable[str]) -> str:
    """The allowed names instead of an unknown key: the most similar ones, or all if none is similar."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"allowed: {shown}"


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections inside an annotation such as ``RecipeConfig | None`` or ``list[TaskConfig]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, UnionType, list, typing.Annotated):
        return [model for argument in typing.get_args(annotation) for model in _models(argument)]
    return []


def _section_at(root: type[BaseModel], location: tuple[str | int, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int) or section is None:
            continue
        field = section.model_fields.get(part)
        found = _models(field.annotation) if field else []
        section = found[0] if found else None
    return section


def _line(root: type[BaseModel], error: Any) -> str:
    location, kind, found, context = error["loc"], error["type"], error["input"], error.get("ctx", {})
    path = ".".join(str(part) for part in location) or "config"
    if kind == "extra_forbidden" and path in RENAMED:
        return f"{path}: this key is now called {RENAMED[path]}"
    if kind == "extra_forbidden":
        section = _section_at(root, location[:-1])
        return f"{path}: unknown key; {closest(str(location[-1]), section.model_fields if section else [])}"
    if kind == "missing":
        return f"{path}: missing; this key must be given"
    if kind == "value_error":
        return f"{path}: {context['error']}"
    if kind == "literal_error":
        return f"{path}: found {found!r}; allowed: {context['expected']}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{path}: found {found!r}; allowed: {words} {context[name]}"
    if kind in ("too_short", "string_too_short"):
        return f"{path}: found {found!r}; allowed: at least {context['min_length']} entries"
    family = kind.split("_")[0]
    if family == "model" or kind == "dict_type":
        return f"{path}: found {found!r}; allowed: a mapping of keys"
    if family in _KINDS:
        return f"{path}: found {found!r}; allowed: {_KINDS[family]}"
    return f"{path}: found {found!r}; {error['msg']}"


def lines(root: type[BaseModel], error: ValidationError) -> list[str]:
    """One line per violation, in the order of the schema."""
    return [_line(root, item) for item in error.errors(include_url=False)]
