"""Names that a reader meets: a class is known by its name alone."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import megatron_tlt

PACKAGE = Path(megatron_tlt.__file__).parent


def test_no_two_public_classes_have_one_name() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(file.relative_to(PACKAGE)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
