#!/usr/bin/env python
"""Writes what a release of vLLM gives us to lean on, read from a wheel's sources without importing anything.

    python tools/interface_lock.py 0.32.0                     # downloads the GPU wheel, some 300 MB
    python tools/interface_lock.py 0.32.0 --wheel FILE.whl    # takes this one

The result is ``tests/interface/vllm-RELEASE.json``: for each part that ``rollout/vllm_versions.py`` and
``vllm_graphs.py`` list, or that the package's code uses (``interface_uses.py``), its kind and the names of its
parameters, and for functions that we replace or imitate a checksum of the body. The tests hold our code against every
such file, and the file of the installed release against the installed sources.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.rollout.vllm_graphs import REQUIRED_GRAPH_ATTRIBUTES
from megatron_tlt.rollout.vllm_versions import CPU_ATTRIBUTES, REPLACED, REQUIRED_ATTRIBUTES
from tools.interface_uses import uses_of

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "interface"
Entry = dict[str, Any]
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_JUMPS = 8
"""From a name to where it is defined, over imports and base classes."""


class Sources:
    """The modules below some folders, of which the first that has a module counts, parsed when they are asked for."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._trees: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """The syntax tree of a module or package; None where there is none."""
        if name not in self._trees:
            bases = [root.joinpath(*name.split(".")) for root in self._roots]
            files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
            path = next(filter(Path.is_file, files), None)
            self._trees[name] = None if path is None else ast.parse(path.read_text(encoding="utf-8"))
        return self._trees[name]

    def is_package(self, name: str) -> bool:
        return any(root.joinpath(*name.split("."), "__init__.py").is_file() for root in self._roots)

    def find(self, module: str, dotted: str, jumps: int = _MOST_JUMPS) -> tuple[str, ast.AST] | None:
        """The defining module and node of ``module.dotted``, over re-exports and base classes; None: absent."""
        tree = self.module(module)
        if tree is None or jumps == 0:
            return None
        first, _, rest = dotted.partition(".")
        for node in _statements(tree.body):
            if _defines(node, first):
                found: tuple[str, ast.AST] = (module, node)
                return self._member(module, node, rest, jumps) if rest else found
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == first:
                        return self._imported(module, node, alias.name, rest, jumps)
                    if alias.name == "*" and (star := self._imported(module, node, first, rest, jumps)) is not None:
                        return star
        if (named := _lazily_imported(tree, first)) is not None:
            return self.find(*named, jumps=jumps - 1)
        submodule = self.module(f"{module}.{first}")
        if submodule is None:
            return None
        return self.find(f"{module}.{first}", rest, jumps - 1) if rest else (f"{module}.{first}", submodule)

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, rest: str, jumps: int
    ) -> tuple[str, ast.AST] | None:
        source = node.module or ""
        if node.level:
            package = module.split(".") if self.is_package(module) else module.split(".")[:-1]
            source = ".".join([*package[: len(package) - node.level + 1], *filter(None, [source])])
        if self.module(f"{source}.{name}") is not None and rest:
            return self.find(f"{source}.{name}", rest, jumps - 1)
        return self.find(source, f"{name}.{rest}" if rest else name, jumps - 1)

    def _member(self, module: str, node: ast.AST, rest: str, jumps: int) -> tuple[str, ast.AST] | None:
        if not isinstance(node, ast.ClassDef):
            return module, node  # an attribute of a value: its assignment is all that can be read
        for part in node.body:
            if _defines(part, rest):
                return module, part
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__" and _sets(function, rest):
                return module, function
        for base in node.bases:
            name = ast.unparse(base).split("[")[0]
            found = self.find(module, f"{name}.{rest}", jumps - 1)
            if found is not None:
                return found
        setters = (part for part in node.body if isinstance(part, ast.FunctionDef) and _sets(part, rest))
        return next(((module, part) for part in setters), None)


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Statements of a module, those inside ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | _Function):
        return node.name == name
    targets: Sequence[ast.expr] = ()
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _sets(function: ast.FunctionDef, name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
        for node in ast.walk(function)
    )


def _lazily_imported(tree: ast.Module, name: str) -> tuple[str, str] | None:
    """(module, name) by a table ``{"name": ".module:name"}`` of a module's ``__getattr__``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                    module, _, attribute = str(value.value).partition(":")
                    if attribute:
                        return f"vllm{module}", attribute
    return None


def _parameters(node: ast.AST) -> list[str] | None:
    """A function's parameters, or the fields of a class as it is constructed; None for other things."""
    if isinstance(node, ast.ClassDef):
        init = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
        if init is not None:
            return _parameters(init)
        fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
        return [field.id for field in fields if isinstance(field, ast.Name)]
    if not isinstance(node, _Function):
        return None
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [f"{argument.arg}=" for argument in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def checksum(node: ast.AST) -> str:
    """Of the code of a function or class; comments, docstrings and layout do not count."""
    copy = ast.parse(ast.unparse(node))
    for part in ast.walk(copy):
        if not getattr(part, "type_params", True):
            del part.type_params  # type: ignore[attr-defined]  # Python 3.12 adds an empty list
        if isinstance(part, ast.ClassDef | _Function) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(copy).encode()).hexdigest()[:16]


def lock(*roots: Path) -> dict[str, Entry | None]:
    """``module:attribute`` of everything that we use in the sources below ``roots`` -> what it is; None: absent."""
    sources = Sources(roots)
    replaced = {*REPLACED, *REQUIRED_GRAPH_ATTRIBUTES}
    entries: dict[str, Entry | None] = {}
    for module, dotted in sorted({*REQUIRED_ATTRIBUTES, *CPU_ATTRIBUTES, *replaced, *uses_of().parts}):
        found = sources.find(module, dotted)
        if found is None:
            entries[f"{module}:{dotted}"] = None
            continue
        where, node = found
        entry: Entry = {"in": where, "kind": type(node).__name__}
        if (parameters := _parameters(node)) is not None:
            entry["parameters"] = parameters
        if (module, dotted) in replaced and isinstance(node, _Function):
            entry["checksum"] = checksum(node)
        entries[f"{module}:{dotted}"] = entry
    return entries


def differences(wanted: dict[str, Entry | None], found: dict[str, Entry | None]) -> list[str]:
    """A line for each part that is not in ``found`` as ``wanted`` has it."""
    lines = []
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            lines.append(f"{name}: locked {wanted.get(name)}, found {found.get(name)}")
    return lines


def _download(release: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux1_x86_64"]
    done = subprocess.run([*command, f"vllm=={release}", "--dest", str(folder)], capture_output=True, text=True)
    wheels = list(folder.glob("vllm-*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(f"vllm {release}: pip found no wheel: {done.stderr.strip().splitlines()[-1:]}")
    return wheels[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the lock of one release; status 2 with a message where that is impossible."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="such as 0.32.0")
    parser.add_argument("--wheel", type=Path, help="this file instead of a download")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        try:
            wheel = arguments.wheel or _download(arguments.release, Path(work))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work, [name for name in archive.namelist() if name.endswith(".py")])
        except (ConfigError, OSError, zipfile.BadZipFile) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        entries = lock(Path(work))
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    atomic_write_text(FOLDER / f"vllm-{arguments.release}.json", "{\n" + lines + "\n}\n")
    absent = [name for name, entry in entries.items() if entry is None]
    print(f"{len(entries)} parts, absent: {', '.join(absent) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
