"""A module as a user writes one: importable here and by the processes that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def add_module(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes ``name`` (dotted; another one in each test, as modules stay imported) below ``folder`` on PYTHONPATH."""
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), *paths])))
        monkeypatch.syspath_prepend(str(folder))
