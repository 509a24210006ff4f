"""Tests and tools import names that exist; the type checker reads the package alone."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def defined(module: str) -> set[str]:
    """Names at a module's top level, and its submodules."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for folder in spec.submodule_search_locations or ():
        names |= {path.stem for path in Path(folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    return names


def imports_of(path: Path) -> list[tuple[str, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("megatron_tlt", "tests"):
            found += [(node.module, alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("folder", ["megatron_tlt", "tests", "tools"])
def test_what_is_imported_from_this_repository_exists(folder: str) -> None:
    known: dict[str, set[str]] = {}
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for module, name in imports_of(path):
            if module not in known:
                try:
                    known[module] = defined(module)
                except ModuleNotFoundError:
                    known[module] = set()
            if name not in known[module]:
                missing.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert missing == []
