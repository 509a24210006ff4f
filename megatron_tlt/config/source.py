"""Merges YAML files and command-line overrides into one plain dictionary; independent of the schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_tlt.config.shipped import LAUNCH, resolve_inputs
from megatron_tlt.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML loader that refuses duplicate keys; PyYAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice, on lines {seen[key]} and {line}", key_node.start_mark
                )
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads 1e-3 as a string and only 1.0e-3 as a number; learning rates are usually written without the dot.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_text(path: Path) -> str:
    """The text of a config; raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the config: {reason}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads one file; a ConfigError names the file, and the line if the YAML error has one."""
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    """The values of a file's text; raises as :func:`read_yaml` does."""
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, found {type(value).__name__}")
    return value


def deep_merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Merges ``top`` over ``base``: mappings merge key by key; all other values, including lists, are replaced."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def read_inherited(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a config and merges it over the files of its ``defaults:`` list.

    These are relative to the file, or else shipped ones. Paths to read are resolved by ``shipped.resolve_inputs``.
    """
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"{path}: 'defaults' forms a cycle: {names}")
    own = read_yaml(path)
    parents = own.pop("defaults", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError(f"{path}: 'defaults' is {parents!r}; allowed: a list of file names")
    resolve_inputs(own, path.parent)
    merged: dict[str, Any] = {}
    for parent in parents:
        file = path.parent / parent
        if not file.is_file() and (LAUNCH / parent).is_file():
            file = LAUNCH / parent
        merged = deep_merge(merged, read_inherited(file, (*chain, resolved)))
    return deep_merge(merged, own)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Applies ``key.path=value`` in place; path components index into lists; the value is YAML."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r}: the form is key.path=value")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {text!r} is not valid YAML") from error
    node: Any = values
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        at = ".".join(parts[:depth])
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError(f"override {override!r}: {at} is a list; allowed: an index from 0 to {len(node) - 1}")
            index = int(part)
            if last:
                node[index] = value
            node = node[index]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            elif node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise ConfigError(f"override {override!r}: {at} is the value {node!r} and has no keys")


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Applies all overrides in order, in place; every malformed one is reported at once."""
    problems: list[str] = []
    for override in overrides:
        try:
            apply_override(values, override)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
