"""The files that the package carries (``launch/``), and where a config's relative paths lead.

``launch`` in this package is a link in a checkout and a folder in a wheel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_tlt.config.violations import closest
from megatron_tlt.errors import ConfigError

LAUNCH = (Path(__file__).resolve().parents[1] / "launch").resolve()
"""Launch configs, ``architectures/``, ``clusters/``, and ``shared/`` parents of configs."""

INPUT_PATHS = (
    "model.path",
    "model.architecture",
    "model.recipe.base",
    "model.recipe.supervised.data",
    "tasks.path",
    "tasks.held_out_path",
    "tasks.tier_file",
    "evaluation.sets.tasks.path",
    "evaluation.sets.tasks.held_out_path",
    "evaluation.sets.tasks.tier_file",
    "speculation.path",
    "algorithm.kl.reference",
    "drafter.path",
)
"""Keys that name a file or folder to read. The other paths are written, below the working folder."""


def shipped(kind: str = "") -> dict[str, Path]:
    """Name to file of the launch configs, or of the files in the folder ``kind``."""
    return {file.stem: file for file in sorted((LAUNCH / kind).glob("*.*")) if file.suffix in (".yaml", ".json")}


def find_config(path: Path, kind: str = "") -> Path:
    """``path`` if it is a file; for a bare name without a file, the shipped config of this name.

    Raises:
        ConfigError: there is neither; names what is similar.
    """
    if path.is_file():
        return path
    name, known = path.name.removesuffix(".yaml"), shipped(kind)
    if path.parent == Path() and name in known:
        return shortest(known[name])
    if path.exists():
        raise ConfigError(f"{path}: cannot read the config: not a file")
    near = f"did you mean the shipped {name}?" if name in known else f"of the shipped ones, {closest(name, known)}"
    raise ConfigError(f"{path}: cannot read the config: no such file; {near}")


def shortest(path: Path) -> Path:
    """``path`` relative to the working folder if it lies in it, otherwise absolute."""
    whole = Path(os.path.abspath(path))
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


def resolve_inputs(values: dict[str, Any], folder: Path) -> None:
    """Makes the relative ``INPUT_PATHS`` in one file's values independent of the working folder, in place.

    A path is looked up in ``folder``, the file's own, then in the working folder, then among the shipped files. A path
    found nowhere stays as it is: relative to the working folder.
    """
    for key in INPUT_PATHS:
        *sections, last = key.split(".")
        for section in _sections(values, sections):
            given = section.get(last)
            if isinstance(given, str) and given and not Path(given).is_absolute():
                section[last] = _located(given, folder)


def _located(given: str, folder: Path) -> str:
    if not (beside := folder / given).exists() and (Path(given).exists() or not (beside := LAUNCH / given).exists()):
        return given
    return str(shortest(beside))


def _sections(node: Any, parts: list[str]) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [section for item in node for section in _sections(item, parts)]
    if not isinstance(node, dict):
        return []
    return _sections(node.get(parts[0]), parts[1:]) if parts else [node]
