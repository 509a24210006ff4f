"""The fields of an installed library's dataclass, read from its source without importing it.

Importing vLLM takes 10 to 50 s on a busy machine, and Megatron must not be imported before the CPU adapter. Detecting
a mistyped key needs neither. Only types that can be parsed are checked; a field of any other type accepts any value.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True)
class FieldType:
    """The values that a field accepts: scalar types, literal choices, None; ``open`` if the type cannot be parsed."""

    scalars: frozenset[str] = frozenset()
    choices: tuple[Any, ...] = ()
    none: bool = False
    open: bool = False

    def __or__(self, other: FieldType) -> FieldType:
        return FieldType(
            self.scalars | other.scalars,
            (*self.choices, *(c for c in other.choices if c not in self.choices)),
            self.none or other.none,
            self.open or other.open,
        )

    def accepts(self, value: Any) -> bool:
        if self.open:
            return True
        if value is None:
            return self.none
        if any(value == choice and type(value) is type(choice) for choice in self.choices):
            return True
        # in Python a bool is an int; in a config it is not
        return any(
            isinstance(value, _SCALARS[name]) and (name == "bool" or not isinstance(value, bool))
            for name in self.scalars
        )

    def __str__(self) -> str:
        words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
        parts = [words[name] for name in sorted(self.scalars)] + [repr(choice) for choice in self.choices]
        return ", ".join(parts + (["null"] if self.none else []))


OPEN = FieldType(open=True)


@cache
def _module_file(module: str) -> Path | None:
    """The source file of a module; finds only the top-level package's spec, so nothing is imported."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for root in (spec.submodule_search_locations or []) if spec else []:
        base = Path(root, *rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


@cache
def _module_tree(module: str) -> ast.Module | None:
    file = _module_file(module)
    return ast.parse(file.read_text(encoding="utf-8")) if file else None


def _imported_from(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    file = _module_file(module)
    package = module.split(".") if file and file.name == "__init__.py" else module.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *((node.module or "").split(".") if node.module else [])])


@cache
def _definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.expr] | None:
    """The definition of a module's name, as (module, class or assigned expression); follows imports."""
    tree = _module_tree(module)
    for node in tree.body if tree else []:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node.value
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
            and node.value
        ):
            return module, node.value
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(_imported_from(module, node), alias.name)
    return None


def _named(module: str, name: str) -> FieldType:
    if name in _SCALARS:
        return FieldType(scalars=frozenset([name]))
    found = _definition(module, name)
    return _field_type(found[0], found[1]) if found and isinstance(found[1], ast.expr) else OPEN


def _literal(node: ast.expr) -> FieldType:
    elements = node.elts if isinstance(node, ast.Tuple) else [node]
    if not all(isinstance(element, ast.Constant) for element in elements):
        return OPEN
    return FieldType(choices=tuple(element.value for element in elements if isinstance(element, ast.Constant)))


def _field_type(module: str, node: ast.expr) -> FieldType:
    match node:
        case ast.Constant(value=None):
            return FieldType(none=True)
        case ast.Constant(value=str(text)):
            return _field_type(module, ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            return _named(module, name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _field_type(module, left) | _field_type(module, right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _field_type(module, inner) | FieldType(none=True)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            union = FieldType()
            for member in members:
                union = union | _field_type(module, member)
            return union
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return _literal(inner)
    return OPEN


@cache
def library_fields(module: str, class_name: str) -> dict[str, FieldType]:
    """Public fields of a dataclass, including its bases'; empty if the library is not installed."""
    found = _definition(module, class_name)
    if found is None:
        return {}
    home, node = found
    if not isinstance(node, ast.ClassDef):
        return {}
    fields: dict[str, FieldType] = {}
    for base in node.bases:
        if isinstance(base, ast.Name):
            fields |= library_fields(home, base.id)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            kind = _field_type(home, item.annotation)
            # `x: int = None` is common in both libraries and means that None is accepted
            if isinstance(item.value, ast.Constant) and item.value.value is None:
                kind = kind | FieldType(none=True)
            fields[item.target.id] = kind
    return fields
